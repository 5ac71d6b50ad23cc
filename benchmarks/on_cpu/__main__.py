"""Measures one subject: `python -m benchmarks.on_cpu SUBJECT [--to PAGE]`."""

from benchmarks.harness import command

main = command("on_cpu", provider="cpu")

if __name__ == "__main__":
    main()
