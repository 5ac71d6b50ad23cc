"""Measures one subject: `python -m benchmarks.on_cpu SUBJECT --provider cpu --threads 1 [--to PAGE]`."""

import pathlib

from benchmarks.harness import command

main = command(pathlib.Path(__file__).parent)

if __name__ == "__main__":
    main()
