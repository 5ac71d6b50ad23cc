"""Lines for a terminal, whatever names in them hold."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import click


def echo(*lines: str, err: bool = False) -> None:
    """Prints lines, each of which stays one.

    Args:
        *lines: The lines.
        err: Whether to print to stderr.
    """
    from onnx_attnfuse.report.lines import one_line

    for line in lines:
        click.echo(one_line(line), err=err)


class Exit(enum.IntEnum):
    """Exit status of `attnfuse`."""

    DONE = 0
    TOO_FEW = 1
    BAD_INPUT = 2
    DIFFERS = 3
    DEFECT = 4
    INTERRUPTED = 130
    TERMINATED = 143


MEANINGS: Mapping[int, str] = {
    Exit.DONE: "Done.",
    Exit.TOO_FEW: (
        "The model is written, but less was fused than --min-fused, --require-all or --cache shared asks for, or no attention "
        "became the --target."
    ),
    Exit.BAD_INPUT: "The command line or the model is invalid, or the result cannot be written. One line on stderr says why.",
    Exit.DIFFERS: (
        "Verification found a difference, or a user pattern failed; these places were left unchanged and the written model is "
        "right. With --verify model, or for a conversion: the whole model differs and nothing was written. For verify and "
        "check-certificate: the models differ, or the certificate does not hold."
    ),
    Exit.DEFECT: (
        "A defect of attnfuse. Please report it with the attnfuse-error-<time>.txt file. If the message says that the rest is "
        "done, the written model is right."
    ),
    Exit.INTERRUPTED: "Interrupted.",
    Exit.TERMINATED: "Ended by SIGTERM; partly written files are removed.",
}
"""A description of each."""
