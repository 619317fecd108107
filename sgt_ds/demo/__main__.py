"""`python -m sgt_ds.demo`: a small end-to-end run, in a few minutes on a CPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sgt_ds.demo.console import Console
from sgt_ds.demo.pipeline import Demo
from sgt_ds.demo.processes import Interrupted, interruptible
from sgt_ds.demo.settings import DEFAULT_WORK_DIR, Settings
from sgt_ds.errors import SgtError, refused_by_system
from sgt_ds.terminal import take_any_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo. Returns the exit status: that of the command that failed, if one did."""
    parser = argparse.ArgumentParser(
        prog="python -m sgt_ds.demo",
        description="A small end-to-end run: data, training, scraping, conversion, text.",
        epilog="example: python -m sgt_ds.demo --data 'c4/*.json.gz'",
    )
    parser.add_argument(
        "--data",
        metavar="GLOB",
        help="train on the first 6 MB of these C4 shards instead of synthetic stories",
    )
    parser.add_argument(
        "--work-dir",
        type=Path,
        help=f"folder of all that the demo writes (default {DEFAULT_WORK_DIR}, "
        f"with --data {DEFAULT_WORK_DIR / 'own'})",
    )
    take_any_text()
    options = parser.parse_args(arguments)
    default = DEFAULT_WORK_DIR / "own" if options.data else DEFAULT_WORK_DIR
    try:
        with interruptible():
            Demo(Settings(options.work_dir or default, options.data or None), Console()).run()
    except (SgtError, OSError) as error:
        told = error if isinstance(error, SgtError) else refused_by_system(error)
        if told is None:
            raise
        print(told, file=sys.stderr)
        return told.exit_code
    except (Interrupted, KeyboardInterrupt):
        print("\ninterrupted; the same command continues from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
