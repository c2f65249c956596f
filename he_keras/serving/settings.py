"""What a server can be told."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ServingSettings:
    """Address, batching and limits of a server.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        max_batch_size: examples that one run of the model takes, and so the most of one request.
        batch_timeout_ms: how long the first request of a batch waits for others.
        max_queue: examples that may wait for the model; beyond, requests get 503.
        max_body_bytes: size of a request's body, unpacked if it is compressed; beyond, 413.
        max_image_pixels: width times height of one PNG or JPEG, read before it is decoded.
        timeout_seconds: for a body to arrive (408 beyond) and for an answer to be computed (504).
        poll_seconds: how often the folders are looked at for new versions.

    Example:
        >>> ServingSettings(max_batch_size=64).port
        8501
    """

    host: str = "127.0.0.1"
    port: int = 8501
    max_batch_size: int = 32
    batch_timeout_ms: float = 2.0
    max_queue: int = 1024
    max_body_bytes: int = 16 * 2**20
    max_image_pixels: int = 2048 * 2048
    timeout_seconds: float = 30.0
    poll_seconds: float = 1.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("host", "port", "batch_timeout_ms"):
                continue
            if not value > 0:
                raise ValueError(
                    f"Invalid limit; expected a positive number; received {field.name}={value}"
                )
        if not 0 <= self.port <= 65535:
            raise ValueError(f"Invalid port; expected 0 to 65535; received port={self.port}")
        if not self.batch_timeout_ms >= 0:
            raise ValueError(
                "Invalid waiting time; expected 0 or more milliseconds; "
                f"received batch_timeout_ms={self.batch_timeout_ms}"
            )
        if self.max_queue < self.max_batch_size:
            raise ValueError(
                f"The queue is shorter than a batch; expected max_queue >= {self.max_batch_size}; "
                f"received max_queue={self.max_queue}"
            )
