"""The metrics of a server, for Prometheus."""

import functools

#: Upper ends of the histograms' bins, in seconds and in examples: chosen, evenly on a log scale.
_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """The metrics of one server, in a registry of its own.

    Only names of served models become values of the label `model`. Names that clients invent
    would fill the memory.
    """

    def __init__(self):
        import prometheus_client as prometheus

        self._prometheus = prometheus
        registry = self._registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)
        self._requests = prometheus.Counter(
            "he_keras_requests", "Answered requests.", ["model", "code"], registry=registry
        )
        self._counters: dict = {}
        histogram = functools.partial(prometheus.Histogram, labelnames=["model"], registry=registry)
        self._latency = histogram(
            "he_keras_request_seconds",
            "Time from the head of a predict request to its answer.",
            buckets=_LATENCIES,
        )
        self._batches = histogram(
            "he_keras_batch_examples", "Examples of each run of the model.", buckets=_BATCHES
        )
        self._run_seconds = histogram(
            "he_keras_run_seconds", "Time of each run of the model.", buckets=_LATENCIES
        )
        self._queue = prometheus.Gauge(
            "he_keras_queue_examples", "Examples that wait for the model.", registry=registry
        )
        self._version = prometheus.Gauge(
            "he_keras_model_version", "Version in service.", ["model"], registry=registry
        )
        self._loads = prometheus.Counter(
            "he_keras_model_loads",
            "Versions that were loaded, or failed to.",
            ["model", "result"],
            registry=registry,
        )

    def count_request(self, model: str, code: int) -> None:
        """Counts an answer; `model` is empty if no served model was asked for."""
        # Finding a counter by its labels costs more than counting.
        if (model, code) not in self._counters:
            self._counters[model, code] = self._requests.labels(model, str(code))
        self._counters[model, code].inc()

    def observe_request(self, model: str, seconds: float) -> None:
        """Records how long a predict request took."""
        self._latency.labels(model).observe(seconds)

    def observe_run(self, model: str, num_examples: int, seconds: float) -> None:
        """Records a run of the model."""
        self._batches.labels(model).observe(num_examples)
        self._run_seconds.labels(model).observe(seconds)

    def set_queue(self, num_examples: int) -> None:
        """Records the length of the queue."""
        self._queue.set(num_examples)

    def set_version(self, model: str, version: int) -> None:
        """Records the version in service."""
        self._version.labels(model).set(version)

    def count_load(self, model: str, result: str) -> None:
        """Counts a version that was "loaded" or "failed"."""
        self._loads.labels(model, result).inc()

    def text(self) -> tuple[bytes, str]:
        """Returns all metrics in Prometheus's text format, and the type of that content."""
        return self._prometheus.generate_latest(
            self._registry
        ), self._prometheus.CONTENT_TYPE_LATEST
