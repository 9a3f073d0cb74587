"""Every metric name, once. Prometheus reads them at a coordinator's or a gateway's /metrics."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from blocktrain.wire.owner import Status

PREFIX = "blocktrain_"
REGISTRY = CollectorRegistry()
REQUESTS = Counter(
    PREFIX + "requests", "HTTP requests answered.", ["route", "status"], registry=REGISTRY
)
RECEIPTS = Histogram(
    PREFIX + "receipt_seconds",
    "From an update's last byte to its receipt.",
    buckets=(0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
    registry=REGISTRY,
)


class RunCollector:
    """The state of the run at the moment somebody looks."""

    def __init__(self, status: Status) -> None:
        self.status = status

    def collect(self) -> Iterator[Metric]:
        """What Prometheus asks for."""
        now = self.status
        round = GaugeMetricFamily(PREFIX + "round", "Newest round begun.", labels=["block"])
        allowance = GaugeMetricFamily(
            PREFIX + "round_allowance_seconds", "Seconds a round may take.", labels=["block"]
        )
        updates = CounterMetricFamily(
            PREFIX + "updates", "Updates with a receipt.", labels=["block", "verdict"]
        )
        for block in now.blocks:
            name = str(block.block + 1)
            round.add_metric([name], block.round)
            allowance.add_metric([name], block.allowance)
            for verdict in ("taken", "late", "refused"):
                updates.add_metric([name, verdict], getattr(block, verdict))
        yield from (round, allowance, updates)
        here = sum(worker.here for worker in now.workers)
        yield GaugeMetricFamily(PREFIX + "workers", "Workers heard of lately.", value=here)
        yield GaugeMetricFamily(
            PREFIX + "bytes_seen", "Bytes each block was trained on.", value=now.bytes_seen
        )
        yield CounterMetricFamily(
            PREFIX + "bytes_moved", "Bytes at the workers' sockets.", value=now.bytes_moved
        )
        yield GaugeMetricFamily(
            PREFIX + "running", "1 while rounds go on.", value=float(now.state == "running")
        )
        if now.curve:
            yield GaugeMetricFamily(
                PREFIX + "ce_nats", "CE the owner measured last.", value=now.curve[-1].ce
            )


def render(status: Status) -> bytes:
    """The page that Prometheus reads."""
    run = CollectorRegistry()
    run.register(RunCollector(status))
    return bytes(generate_latest(REGISTRY)) + bytes(generate_latest(run))


# --- a gateway ------------------------------------------------------------------------------------

SERVING = CollectorRegistry()
ANSWERS = Counter(
    PREFIX + "gateway_requests", "HTTP requests answered.", ["route", "status"], registry=SERVING
)
TEXTS = Counter(
    PREFIX + "texts", "Texts asked for, by how they ended.", ["mode", "end"], registry=SERVING
)
TRAVERSALS = Counter(PREFIX + "traversals", "Passes through the pipeline.", registry=SERVING)
TEXT_BYTES = Counter(PREFIX + "text_bytes", "Bytes generated.", registry=SERVING)
WIRE_BYTES = Counter(PREFIX + "wire_bytes", "Bytes sent between stages for it.", registry=SERVING)
REPLAYS = Counter(
    PREFIX + "replays", "Times a stage was replaced and a text given again.", registry=SERVING
)
FIRST_BYTE = Histogram(
    PREFIX + "first_byte_seconds",
    "From a request to the first byte of its text, the wait in line included.",
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    registry=SERVING,
)
SERVED = Gauge(PREFIX + "texts_now", "Texts in the making.", registry=SERVING)
WAITING = Gauge(PREFIX + "texts_waiting", "Requests in line.", registry=SERVING)
STAGES = Gauge(PREFIX + "stages", "Stages the gateway can use now.", registry=SERVING)


def render_serving() -> bytes:
    """The page that Prometheus reads at a gateway."""
    return bytes(generate_latest(SERVING))
