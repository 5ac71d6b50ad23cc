"""Measures one subject: `PYTHONPATH=.:patterns:cli python -m benchmarks.on_torch SUBJECT [--to PAGE]`."""

import pathlib

from benchmarks.harness import command

main = command(pathlib.Path(__file__).parent)

if __name__ == "__main__":
    main()
