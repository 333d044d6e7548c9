"""Errors that the dashboard returns for a request that it cannot answer."""

from __future__ import annotations


class Refused(Exception):
    """A request that gets an error: ``code`` for the page, and a whole sentence for people."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


def bad_request(message: str) -> Refused:
    return Refused(400, "bad_request", message)


def not_found(message: str) -> Refused:
    return Refused(404, "not_found", message)


def unknown_run(name: str) -> Refused:
    return Refused(404, "unknown_run", f"There is no run {name!r} here. It may have been deleted or renamed.")


def unreadable(message: str) -> Refused:
    return Refused(422, "unreadable", message)
