"""Speed and memory of the data pipeline.

    python benchmarks/data.py [--root DIR] [--rows N] [--seconds S]

Prints tokens per second of one process for streaming text and for the token cache, each as a ratio to a plain loop
over a `datasets` stream with SentencePiece, measured in turns in the same run; then what resuming costs early and
late in a run, and memory over a million rows. DIR is a corpus in C4's layout; without it, one is made up.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the loop reads local files

import datasets
import numpy as np
import sentencepiece
import torch

from selmodel.data.datamodule import DataModule
from selmodel.data.sources import LocalSource
from selmodel.data.token_cache_writer import build_token_cache
from selmodel.data.tokenizer import SentencePieceTokenizer, Tokenizer
from selmodel.data.tokenizer_training import sample_texts, train_sentencepiece

CONTEXT_LENGTH, BATCH_SIZE, STREAMS = 512, 64, 64
TURNS = 5
PREFETCH = 4
MILLION, MILLION_SHARDS = 1_000_000, 16


def write_corpus(root: Path, shards: int, rows: int, words_per_row: int, seed: int = 0) -> None:
    """A corpus of made-up words whose frequencies fall as those of natural text do; rows of geometric length."""
    rng = np.random.default_rng(seed)
    syllables = np.array([c + v for c in "bcdfghklmnprstvw" for v in ("a", "e", "i", "o", "u", "an", "er", "or")])
    words = np.array(["".join(rng.choice(syllables, n)) for n in rng.integers(1, 5, 20_000)])
    weights = 1 / np.arange(1, len(words) + 1)
    weights /= weights.sum()

    def text() -> str:
        return " ".join(words[rng.choice(len(words), rng.geometric(1 / words_per_row), p=weights)]) + "."

    # Distinct texts are costly to make; a pool of them, drawn from at random, costs the pipeline as much to read.
    pool = [text() for _ in range(min(rows, 20_000))]
    root.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        path = root / f"c4-train.{shard:05d}-of-{shards:05d}.json.gz"
        with gzip.open(path, "wt", compresslevel=1) as file:
            for i in rng.integers(len(pool), size=rows // shards):
                file.write(json.dumps({"text": pool[i]}) + "\n")
    with gzip.open(root / "c4-validation.00000-of-00001.json.gz", "wt") as file:
        for text in pool[:200]:
            file.write(json.dumps({"text": text}) + "\n")


def plain_loop(files: list[str], model: Path) -> Iterator[int]:
    """Tokens of one document after the other, read and tokenized the plain way."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    while True:
        for row in datasets.load_dataset("json", data_files=files, split="train", streaming=True):
            yield len(processor.encode(row["text"])) + 1


def batches(source, tokenizer: Tokenizer, *, workers: int = 0, streams: int = STREAMS) -> Iterator[int]:
    """Tokens of one batch after the other."""
    module = DataModule(
        source,
        tokenizer,
        context_length=CONTEXT_LENGTH,
        batch_size=BATCH_SIZE,
        streams=streams,
        workers=workers,
        prefetch=PREFETCH,
    )
    for batch in module.train_dataloader():
        yield batch["tokens"][:, 1:].numel()


def tokens_per_second(counts: Iterator[int], seconds: float) -> float:
    for _ in range(PREFETCH + 2):  # what a worker has made while others had their turn
        next(counts)
    began, tokens = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        tokens += next(counts)
    return tokens / elapsed


def compare_speeds(root: Path, folder: Path, seconds: float) -> None:
    source = LocalSource(str(root))
    model = folder / "tokenizer.model"
    train_sentencepiece(sample_texts(source, sample_bytes=5_000_000), model, vocab_size=8192)
    tokenizer = SentencePieceTokenizer(model)
    began = time.perf_counter()
    cache = build_token_cache(source, tokenizer, folder / "cache")
    shards = cache.index["splits"]["train"]
    tokens = sum(record["tokens"] for record in shards)
    print(
        f"corpus: {len(shards)} shards, {sum(record['rows'] for record in shards):,} rows, {tokens:,} tokens; "
        f"token cache built at {tokens / (time.perf_counter() - began):,.0f} tokens/s"
    )
    files = [shard.location for shard in source.shards("train")]
    ways: dict[str, Callable[[], Iterator[int]]] = {
        "datasets + SentencePiece loop": lambda: plain_loop(files, model),
        "text": lambda: batches(source, tokenizer),
        "text, one worker": lambda: batches(source, tokenizer, workers=1),
        "token cache": lambda: batches(cache, tokenizer),
        "token cache, one worker": lambda: batches(cache, tokenizer, workers=1),
        "token cache, 16 streams": lambda: batches(cache, tokenizer, streams=16),
    }
    running = {name: way() for name, way in ways.items()}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for counts in running.values():
        next(counts)  # opening files and starting workers is not counted
    for _ in range(TURNS):
        for name, counts in running.items():
            speeds[name].append(tokens_per_second(counts, seconds))
    (loop, *others) = speeds
    print(f"\n{'':32s}{'ratio to loop':>14s}{'tokens/s':>16s}{'least':>14s}{'most':>14s}   (median of {TURNS} turns)")
    for name in (loop, *others):
        ratio = statistics.median(ours / plain for ours, plain in zip(speeds[name], speeds[loop], strict=True))
        median, least, most = statistics.median(speeds[name]), min(speeds[name]), max(speeds[name])
        print(f"{name:32s}{ratio:14.2f}{median:16,.0f}{least:14,.0f}{most:14,.0f}")
    print()
    compare_resumes("text", source, tokenizer)
    compare_resumes("token cache", cache, tokenizer)


def compare_resumes(name: str, source, tokenizer: Tokenizer, late: int = 10_000) -> None:
    """Time to the first batch at step 10 and at step `late` of the same run."""
    options = {"context_length": 32, "batch_size": 16, "streams": 16}
    module = DataModule(source, tokenizer, **options)
    states = {}
    for batch in module.train_dataloader():
        module.mark_trained(batch)
        if module.step in (10, late):
            states[module.step] = module.state_dict()
        if module.step == late:
            break
    seconds: dict[int, list[float]] = {step: [] for step in states}
    for _ in range(5 * TURNS):  # these take milliseconds
        for step, state in states.items():
            resumed = DataModule(source, tokenizer, **options)
            resumed.load_state_dict(state)
            began = time.perf_counter()
            next(iter(resumed.train_dataloader()))
            seconds[step].append(time.perf_counter() - began)
    medians = {step: statistics.median(times) for step, times in seconds.items()}
    print(
        f"resume, {name}: first batch at step {late:,} takes {medians[late] / medians[10]:.2f} times that at step 10 "
        f"({medians[late] * 1e3:.1f} ms and {medians[10] * 1e3:.1f} ms)"
    )


def own_memory() -> float:
    """Memory of this process in MB, without file pages that are only mapped."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024


def read_a_million_rows(root: Path, model: Path, cached: bool, pipe) -> None:
    """Sends through `pipe`, in MB: memory after 5 % of an epoch, the most after that, and the peak with mapped files.

    Runs in a fresh process.
    """
    torch.set_num_threads(1)
    source, tokenizer = LocalSource(str(root)), SentencePieceTokenizer(model)
    if cached:
        source = build_token_cache(source, tokenizer, root / "cache")
    module = DataModule(source, tokenizer, context_length=CONTEXT_LENGTH, batch_size=BATCH_SIZE, streams=STREAMS)
    early = most = 0.0
    for step, batch in enumerate(module.train_dataloader()):
        epoch, _, row = batch["state"][:, 1:4].T
        done = np.where(epoch > 0, 1.0, row / (MILLION / MILLION_SHARDS)).mean()
        if done < 0.05:
            early = own_memory()
        elif step % 20 == 0:
            most = max(most, own_memory())
        if done == 1.0:
            break
    pipe.send((early, most, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def measure_memory(folder: Path) -> None:
    root, model = folder / "million", folder / "tokenizer.model"
    write_corpus(root, shards=MILLION_SHARDS, rows=MILLION, words_per_row=20)
    print()
    for cached in (False, True):
        if cached:  # built here, so that building does not count
            build_token_cache(LocalSource(str(root)), SentencePieceTokenizer(model), root / "cache")
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=read_a_million_rows, args=(root, model, cached, theirs)
        )
        process.start()
        early, most, peak = ours.recv()
        process.join()
        name = "token cache" if cached else "text"
        print(
            f"memory, {name}: {most / early:.2f} times as much at most over {MILLION:,} rows as after 5 % of them "
            f"({most:,.0f} MB and {early:,.0f} MB; peak with mapped files {peak:,.0f} MB)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="a corpus in C4's layout; default: a made-up one")
    parser.add_argument("--rows", type=int, default=20_000, help="rows of the made-up corpus")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one turn of one way")
    parser.add_argument("--no-memory", action="store_true", help="leave out the million rows")
    args = parser.parse_args()
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        root = args.root
        if root is None:
            root = Path(folder) / "corpus"
            write_corpus(root, shards=64, rows=args.rows, words_per_row=300)
        compare_speeds(root, Path(folder), args.seconds)
        if not args.no_memory:
            measure_memory(Path(folder))


if __name__ == "__main__":
    main()
