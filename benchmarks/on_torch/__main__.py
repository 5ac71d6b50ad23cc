"""Measures one subject: `PYTHONPATH=.:patterns:cli python -m benchmarks.on_torch SUBJECT [--to PAGE]`."""

from benchmarks.harness import command

main = command("on_torch")

if __name__ == "__main__":
    main()
