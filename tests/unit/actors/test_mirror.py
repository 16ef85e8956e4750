"""What of our series is copied to Ray's."""

from actors.telemetry.metrics import EncoderMetrics
from actors.telemetry.ray_metrics import summed
from router.metrics import RouterMetrics


def test_series_about_replicas_are_added_up_as_ray_never_forgets_a_label() -> None:
    series = RouterMetrics()
    for replica, patches in (("a", 5), ("b", 7), ("a", 1)):
        series.sent(replica, patches)
    found = summed(series.render([("a", 6), ("b", 7)]))
    assert found["encoder_router_patches_total", ()] == 13
    assert found["encoder_router_outstanding_patches", ()] == 13
    assert not any("_created" in name for name, _ in found)


def test_all_other_labels_and_whole_histograms_are_kept() -> None:
    series = EncoderMetrics()
    series.graph_hits.labels("default", "64", "cpu").inc(3)
    series.queue_seconds.observe(0.003)
    found = summed(series.text())
    hits = (("backend", "cpu"), ("budget", "64"), ("path", "default"))
    assert found["encoder_graph_hits_total", hits] == 3
    assert found["encoder_queue_seconds_bucket", (("le", "0.005"),)] == 1
    assert found["encoder_queue_seconds_bucket", (("le", "0.002"),)] == 0
    assert found["encoder_queue_seconds_count", ()] == 1
