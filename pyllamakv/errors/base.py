"""The root of every exception of this package."""

from __future__ import annotations


class KvError(Exception):
    """Stand above everything that this package raises on purpose."""

    #: Exit status of the command line for this error.
    exit_code = 2
    #: What to do next, when the message does not say it.
    hint = ""


class UsageError(KvError, ValueError):
    """Refuse an argument, before anything has been done."""


class ArgumentTypeError(UsageError, TypeError):
    """Refuse an argument of a wrong type: a UsageError that is a TypeError as well."""


class Unsupported(KvError):
    """Say that this library, release or platform lacks a capability, and which one."""

    def __init__(self, message: str, capability: str = "") -> None:
        super().__init__(message)
        self.capability = capability
