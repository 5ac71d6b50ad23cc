"""Every exception this library raises on purpose.

    AttnFuseError                 something a caller may want to catch
    ├── InputError                the model or an option cannot be used as it is
    │   ├── ModelError            the file: missing, truncated, not ONNX, cyclic, ...
    │   └── OptionError           a value the caller chose
    ├── MissingDependencyError    an optional package is needed and absent
    ├── RunError                  a model that was to be measured or watched did not run
    ├── VerificationError         the fused model as a whole differs from the source
    └── InternalError             our own mistake: a rewrite left the graph broken

Each message is one line that states the problem and, after a semicolon, the remedy.
"""

from __future__ import annotations


class AttnFuseError(Exception):
    """Base of all exceptions raised by onnx-attnfuse."""


class InputError(AttnFuseError):
    """An input or option of the caller cannot be used."""


class ModelError(InputError):
    """The model cannot be read, or is not a valid ONNX model."""


class OptionError(InputError):
    """An option has a value that does not exist or contradicts another."""


class MissingDependencyError(AttnFuseError):
    """An optional package is needed for what was asked."""


class RunError(AttnFuseError):
    """A model that was to be measured or watched did not run."""


class VerificationError(AttnFuseError):
    """The fused model does not compute what the source computes."""


class InternalError(AttnFuseError):
    """A defect of this library; the graph it was working on must not be used."""
