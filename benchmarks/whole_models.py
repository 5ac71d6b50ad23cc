"""Exports whole models in float16 without their weights, for `whole_models_on_gpu.py`.

    python benchmarks/whole_models.py FOLDER [--only NAME,...] [--opset N] [--small]

Beside every graph, of less than 2 MB, lies what is known of its inputs. Weights are made where the models are run.
"""

from __future__ import annotations

import argparse
import logging
import pathlib
import time
import warnings

from benchmarks.whole.exports import OPSET, write
from benchmarks.whole.zoo import models


def main() -> None:
    """Exports everything, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--opset", type=int, default=OPSET)
    parser.add_argument("--small", action="store_true", help="stand-ins of two layers, to try the scripts out")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    for name, whole in models(chosen.small).items():
        if chosen.only and name not in chosen.only.split(","):
            continue
        start = time.perf_counter()
        path = write(whole, chosen.folder, chosen.opset)
        print(f"{path.name} {path.stat().st_size / 1e6:.2f} MB, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
