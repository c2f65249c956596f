"""The one exception that becomes an answer to a client."""

import http


class RequestError(Exception):
    """Answers a request with an HTTP status and `{"error": message}`.

    Example:
        >>> RequestError(404, "Servable not found for request: Latest(digits)").status.value
        404
    """

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = http.HTTPStatus(status)


def shown(value, limit: int = 80) -> str:
    """Returns a value for an error message, short whatever the client has sent.

    Example:
        >>> shown("x" * 1000, limit=8)
        "'xxxx..."
    """
    # Only a prefix is printed: a hostile value can be expensive to print as a whole.
    text = repr(value[: limit + 1] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
