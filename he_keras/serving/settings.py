"""The settings of a server."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ServingSettings:
    """Address, batching and limits of a server.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        max_batch_size: the most examples of one run of the model, and so of one request.
        batch_timeout_ms: how long the first request of a batch waits for others.
        max_queue: the most examples that may wait for the model. Further requests get 503.
        max_body_bytes: the most bytes of a request's body after unpacking. A larger one gets 413.
        max_image_pixels: the most pixels (width times height) of one PNG or JPEG. A larger one gets
            400, before it is decoded.
        max_request_pixels: the most pixels of all images of a request, and of one run of the model.
            A larger request gets 413. If sixteen times as many wait, further requests get 503.
        max_connections: the most open connections. If there are more, the server closes the one
            that has sent no whole request for the longest time.
        header_timeout_seconds: how long the head of a request may take to arrive. A slower one gets
            408.
        timeout_seconds: how long a body may take to arrive (otherwise 408), and how long an answer
            may take to compute (otherwise 504).
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
    max_request_pixels: int = 4 * 2048 * 2048
    max_connections: int = 512
    header_timeout_seconds: float = 10.0
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
        if self.max_request_pixels < self.max_image_pixels:
            raise ValueError(
                "A request holds less than an image; expected max_request_pixels >= "
                f"{self.max_image_pixels}; received max_request_pixels={self.max_request_pixels}"
            )
        if self.max_queue < self.max_batch_size:
            raise ValueError(
                f"The queue is shorter than a batch; expected max_queue >= {self.max_batch_size}; "
                f"received max_queue={self.max_queue}"
            )
