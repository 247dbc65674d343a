"""Tokenize a corpus once, for runs that read it many times.

    python data/cache_tokens.py FOLDER [--workers N] [data=local data.root=DIR] [tokenizer.vocab_size=8192] ...

Takes the options of train.py that name a corpus and a tokenizer, and writes the token cache into FOLDER. A run then
reads it with data=tokens data.root=FOLDER and sees the same batches. An interrupted build goes on with the same
command.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

import hydra
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from selmodel.cli import CONFIGS, explain
from selmodel.config import register_resolvers
from selmodel.data.token_cache_writer import build_token_cache
from selmodel.errors import UserError
from selmodel.training.setup import build_corpus


def main(arguments: Sequence[str]) -> int:
    """Writes or continues a token cache; returns the exit status: 2 for a fault of the user's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("folder", help="the cache folder")
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that tokenize a shard each (default: this one)"
    )
    parser.add_argument("options", nargs="*", help="options of train.py")
    args = parser.parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    register_resolvers()
    try:
        if args.workers < 0:
            raise UserError(f"--workers {args.workers}: expected 0 or more processes")
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            cfg = hydra.compose("train", args.options)
        source, tokenizer = build_corpus(cfg)
        cache = build_token_cache(
            source, tokenizer, args.folder, workers=args.workers, progress=lambda progress: print(progress, flush=True)
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (HydraException, OmegaConfBaseException) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    tokens = sum(record["tokens"] for record in cache.index["splits"]["train"])
    options = f"data=tokens data.root={args.folder}"
    if cfg.tokenizer.get("vocab_size"):
        options += f" tokenizer.vocab_size={cfg.tokenizer.vocab_size}"
    print(f"{args.folder}: {tokens:,} tokens to train on; read them with {options}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
