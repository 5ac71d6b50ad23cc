"""Measures one subject: `python -m benchmarks.on_gpu SUBJECT [--to PAGE]`."""

from benchmarks.harness import command

main = command("on_gpu")

if __name__ == "__main__":
    main()
