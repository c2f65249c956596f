"""The load test: how it reads wrk, and one short run of it."""

import shutil

import numpy as np
import pytest
import tensorflow as tf

from he_keras.benchmarks import serving

REPORT = """Running 3s test @ http://127.0.0.1:18004/v1/models/load:predict
  1 threads and 16 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     1.54ms    1.02ms  20.97ms   93.79%
    Req/Sec    10.81k     1.02k   12.05k    83.33%
  Latency Distribution
     50%  900.00us
     75%    1.75ms
     90%    2.35ms
     99%    1.25s
  32274 requests in 3.00s, 5.26MB read
  Non-2xx or 3xx responses: 12
Requests/sec:  10753.50
Transfer/sec:      1.75MB
"""


def test_the_report_of_wrk_is_read():
    answered = serving.read_report(REPORT, images=8)
    assert answered == serving.Answered(speed=86028.0, p50=0.9, p99=1250.0, errors=12)
    with pytest.raises(ValueError, match="Unexpected report of wrk"):
        serving.read_report("unable to connect", images=1)


def test_the_table_has_medians():
    payload = serving.Payload("p", "serve_bytes", 1, 4)
    measured = [
        serving.Measured(serving.Answered(speed, 1.0, 2.0, 1), ratio, 0.95, 0.5)
        for speed, ratio in ((100.0, 0.7), (300.0, 0.9), (200.0, 0.85))
    ]
    lines = serving._table({payload: measured}, [10.0, 1000.0, 300.0], 32).splitlines()
    assert "median 300 images/s (10 to 1,000)" in lines[0]
    assert lines[2].split() == ["p", "4", "200", "0.85", "0.70-0.90", "0.95", "0.50", "1", "2", "3"]


def test_the_program_wrk_is_needed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="expected the program wrk"):
        serving.measure(str(tmp_path), 1.0, 1, 4)


class Brightness(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None, 4, 4, 3], tf.float32, "images")])
    def floats(self, images):
        return {"logits": tf.reduce_mean(images, axis=[1, 2])}

    @tf.function(input_signature=[tf.TensorSpec([None, 4, 4, 3], tf.uint8, "images")])
    def integers(self, images):
        return {"logits": tf.reduce_mean(tf.cast(images, tf.float32), axis=[1, 2])}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("wrk") is None, reason="needs the program wrk")
def test_a_short_load_has_no_errors(tmp_path):
    model = Brightness()
    signatures = {"serving_default": model.floats, "serve_uint8": model.integers}
    tf.saved_model.save(model, str(tmp_path / "1"), signatures=signatures)
    lines = serving.measure(str(tmp_path), 1.0, 1, 32).splitlines()
    rows = [line.split() for line in lines[2:]]
    assert [row[0] for row in rows] == ["JSON"] * 4, "no row for a signature that is not there"
    assert all(row[-1] == "0" for row in rows)
    assert np.all(np.array([row[5].replace(",", "") for row in rows], float) > 0)
