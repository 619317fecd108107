"""The exporters over real HTTP(S), read by prometheus_client's parser and by promtool."""

from __future__ import annotations

import json
import logging
import math
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sgt_ds.config import PRESETS, ModelConfig, TelemetryConfig
from sgt_ds.errors import UserError
from sgt_ds.growth import Loop, State
from sgt_ds.ports import free_ports
from sgt_ds.telemetry import METRICS, DeviceMemory, Exporter, StepRecord, peak_flops
from sgt_ds.telemetry.example import full_snapshot
from sgt_ds.telemetry.exporter import RENDERING_LASTS_SECONDS
from sgt_ds.telemetry.hardware import Hardware, HardwareSampler
from sgt_ds.telemetry.metric import INFO_LABELS, STALL_REASONS
from sgt_ds.telemetry.reference import reference, series_of

TINY = PRESETS["tiny"]
INFO = dict.fromkeys(INFO_LABELS, "x") | {"run": "r", "method": "sgt"}
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]
Start = Callable[..., Exporter]


MARGINS = ("sgt_growth_margin_standard_errors", "sgt_growth_within_noise")


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Exporter] = []

    def start_one(config: TelemetryConfig | None = None, **changes: Any) -> Exporter:
        settings: dict[str, Any] = {
            "model_wide": True,
            "local_rank": 0,
            "rank": 0,
            "info": INFO,
            "model": TINY,
            **changes,
        }
        exporter = Exporter(config or TelemetryConfig(port=free_ports()), **settings)
        exporter.start()
        started.append(exporter)
        return exporter

    yield start_one
    for exporter in started:
        exporter.close()


def scrape(exporter: Exporter, path: str = "/metrics") -> str:
    time.sleep(RENDERING_LASTS_SECONDS)  # past the rendering that a former scrape left
    url = f"http://127.0.0.1:{exporter.port}{path}"
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def series(text: str) -> Series:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(exporter: Exporter, name: str, **labels: str) -> float:
    return series(scrape(exporter))[name, tuple(sorted(labels.items()))]


def looping(layer: int, depth: int = 1) -> State:
    loop = Loop(depth=depth, heads=(1, 3), scope="attention", step=4, entered=4)
    return State({layer: loop}, layer)


def record(step: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": step,
        "tokens": step * 1000,
        "loss": 3.5,
        "learning_rate": 1e-3,
        "grad_norm": 0.7,
        "step_seconds": 0.4,
        "tokens_per_second": 2500.0,
        "flops": step * 11_000_000,
        "vanilla_flops": step * 10_000_000,
        "overhead_ratio": 0.1,
        "flops_per_token": 11_000,
        "mfu_ratio": None,
        "data_wait_seconds": 0.5,
        "skipped_steps": 0,
        "phase": "growing",
        "loops": State(),
        "entropy": [[0.25, 0.5, 0.75, 0.5]] * TINY.num_layers,
        "layer_stderr": [0.01] * TINY.num_layers,
        **changes,
    }
    return StepRecord(**values)


class GpuHost(HardwareSampler):
    """A sampler of a machine with a GPU, which the machine of the tests need not have."""

    def sample(self) -> Hardware:
        return Hardware(1, 2, 3, 4, 5, 6, 0.5, 300.0, 7.0)


def test_every_metric_of_the_table_is_served_and_no_other(start: Start) -> None:
    exporter = start(run_steps=100, hardware=GpuHost(None, None))
    exporter.publish_rank(
        part_seconds={"forward": 1.0},
        collective_seconds=0.1,
        device_memory=DeviceMemory(allocated=1, reserved=2, peak=3, size=4),
    )
    everything = {"mfu_ratio": 0.4, "planned_overhead_ratio": 0.1, "source_tokens": {"a": 1}}
    exporter.publish(record(5, loops=looping(4), **everything))
    exporter.publish_decision("activate", margin={"layer": 1.0, "head": 3.0}, within_noise=True)
    exporter.publish_checkpoint(2.0)
    exporter.publish_validation(3.4)
    exporter.publish_evaluation({"sciq": {"acc": 0.25}})
    served = {
        family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        for family in text_string_to_metric_families(scrape(exporter))
        if family.name.startswith("sgt_")
    }
    # The text format has no type for info: the parser calls it a gauge, suffix and all.
    assert served == {metric.name for metric in METRICS}


def test_a_choice_within_noise_or_a_stall_that_shows_nowhere(start: Start) -> None:
    exporter = start()
    exporter.publish_decision(
        "activate", cause="deepest candidate", margin={"layer": 1.5, "head": 4.0}, within_noise=True
    )
    exporter.publish(record(5, layer_stderr=[0.02, math.nan, *[0.01] * (TINY.num_layers - 2)]))
    found = series(scrape(exporter))
    assert found["sgt_growth_margin_standard_errors", (("kind", "layer"),)] == 1.5
    assert found["sgt_growth_margin_standard_errors", (("kind", "head"),)] == 4.0
    assert found["sgt_growth_within_noise", ()] == 1
    assert found["sgt_layer_entropy_stderr_ratio", (("layer", "0"),)] == 0.02
    assert ("sgt_layer_entropy_stderr_ratio", (("layer", "1"),)) not in found
    # A later decision that weighed nothing takes the margins away.
    exporter.publish_decision("stall", cause="not finite")
    exporter.publish_decision("stall", cause="a cause of somebody's own method")
    exporter.publish(record(6, not_finite=3))
    resumed = start()
    resumed.load_state_dict(json.loads(json.dumps(exporter.state_dict())))
    for served in (exporter, resumed):
        found = series(scrape(served))
        assert not [name for name, _ in found if name.startswith(MARGINS)]
        stalls = {
            dict(labels)["reason"]: value
            for (name, labels), value in found.items()
            if name == "sgt_growth_stalls_total"
        }
        assert stalls.keys() == set(STALL_REASONS)
        assert {reason: count for reason, count in stalls.items() if count} == {
            "not finite": 1,
            "other": 1,
        }
        assert found["sgt_entropy_not_finite_total", ()] == 3


def test_promtool_finds_no_fault_in_a_scrape(start: Start) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is missing; run tests/install_services.sh")
    exporter = start()
    exporter.publish(record(5, loops=looping(4), mfu_ratio=0.4))
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=scrape(exporter), capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_the_values_are_those_that_were_published(start: Start) -> None:
    exporter = start(run_steps=100)
    for step in (1, 2, 3):
        exporter.observe_step(step, 0.4)
    exporter.observe_step(4, 500.0)  # longer than every bucket
    exporter.publish_decision("activate")
    exporter.publish_skip()
    exporter.publish(record(4, loops=looping(4, depth=2), skipped_steps=1))
    found = series(scrape(exporter))
    assert found["sgt_flops_overhead_ratio", ()] == 0.1
    assert found["sgt_tokens_total", ()] == 4000
    assert found["sgt_optimizer_steps_total", ()] == found["sgt_rank_step", ()] == 4
    assert found["sgt_skipped_steps_total", ()] == 1
    assert found["sgt_growth_events_total", (("kind", "activate"),)] == 1
    assert found["sgt_growth_events_total", (("kind", "stall"),)] == 0
    assert found["sgt_loop_depth", (("layer", "4"),)] == 2
    assert found["sgt_looped_head", (("head", "3"), ("layer", "4"))] == 1
    assert found["sgt_layer_entropy_ratio", (("layer", "2"),)] == 0.5
    assert found["sgt_layer_entropy_variance", (("layer", "2"),)] == 0.03125
    assert found["sgt_head_entropy_ratio", (("head", "2"), ("layer", "2"))] == 0.75
    assert found["sgt_step_duration_seconds_bucket", (("le", "0.3"),)] == 0
    assert found["sgt_step_duration_seconds_bucket", (("le", "0.5"),)] == 3
    assert found["sgt_step_duration_seconds_bucket", (("le", "120.0"),)] == 3
    assert found["sgt_step_duration_seconds_count", ()] == 4
    assert found["sgt_step_duration_seconds_sum", ()] == pytest.approx(501.2)
    assert found["sgt_run_info", tuple(sorted({**INFO, "rank": "0"}.items()))] == 1


def test_other_ranks_serve_no_model_wide_series(start: Start) -> None:
    first, second = start(), start(model_wide=False, rank=5)
    for exporter in (first, second):
        exporter.publish(record(5))
    wide = {metric.name for metric in METRICS if metric.scope == "model"}
    assert wide & {name for name, _ in series(scrape(first))}
    assert not wide & {name for name, _ in series(scrape(second))}
    assert value(second, "sgt_rank_step") == 5


def test_what_is_no_longer_so_is_not_served_any_more(start: Start) -> None:
    exporter = start()
    exporter.publish(record(5, loops=looping(4)))
    assert value(exporter, "sgt_loop_depth", layer="4") == 1
    entropy = [[0.5, float("nan"), 0.5, 0.5]] * TINY.num_layers
    exporter.publish(record(6, loops=looping(2), phase="fixed", entropy=entropy))
    found = series(scrape(exporter))
    assert found["sgt_loop_depth", (("layer", "4"),)] == 0
    assert found["sgt_loop_depth", (("layer", "2"),)] == 1
    assert ("sgt_looped_head", (("head", "3"), ("layer", "4"))) not in found
    assert ("sgt_head_entropy_ratio", (("head", "1"), ("layer", "0"))) not in found
    phases = {labels[0][1]: on for (name, labels), on in found.items() if name.endswith("_phase")}
    assert phases == {"warmup": 0, "growing": 0, "fixed": 1}


def test_counters_neither_fall_nor_begin_anew_after_a_crash(start: Start, tmp_path: Path) -> None:
    kept = tmp_path / "counters.json"
    crashed = start(counters_file=kept)
    crashed.publish_decision("activate")
    crashed.publish(record(100))
    state = crashed.state_dict()  # the checkpoint, step 100
    crashed.publish_decision("deepen")
    crashed.publish(record(130))
    before = series(scrape(crashed))
    crashed.close()

    resumed = start(counters_file=kept)
    resumed.load_state_dict(state)
    counters = [m.name for m in METRICS if m.kind == "counter" and m.scope == "model"]
    for step in (None, 101, 131):
        if step is not None:
            resumed.publish(record(step))
        found = series(scrape(resumed))
        for (name, labels), seen in before.items():
            if name in counters:
                assert found[name, labels] >= seen, (name, step)
        assert found["sgt_rank_step", ()] == (step or 100)  # gauges tell the truth
    assert found["sgt_tokens_total", ()] == 131_000
    assert found["sgt_growth_events_total", (("kind", "activate"),)] == 1
    assert ("sgt_checkpoint_last_success_timestamp_seconds", ()) in found


def test_an_unreadable_counters_file_does_not_stop_a_run(start: Start, tmp_path: Path) -> None:
    kept = tmp_path / "counters.json"
    kept.write_text('{"sgt_tokens_total": 7')
    exporter = start(counters_file=kept)
    exporter.publish(record(5))
    assert value(exporter, "sgt_tokens_total") == 5000


def test_a_run_that_ended_is_told_from_one_that_hangs(start: Start) -> None:
    exporter = start()
    exporter.observe_step(1, 0.4)
    assert value(exporter, "sgt_run_state", state="running") == 1
    assert time.time() - value(exporter, "sgt_rank_last_step_timestamp_seconds") < 60
    exporter.finish("completed")
    late: list[float] = []

    def late_scraper() -> None:
        time.sleep(0.5)
        late.append(value(exporter, "sgt_run_state", state="completed"))

    scraper = threading.Thread(target=late_scraper)
    scraper.start()
    exporter.close(wait_seconds=10)  # returns once the end has been read
    scraper.join()
    assert late == [1]


def test_a_port_in_use_is_one_clear_error(start: Start) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is in use") as caught:
            start(TelemetryConfig(port=port - 1), local_rank=1)
        assert caught.value.field == "telemetry.port"
    with pytest.raises(UserError, match=r"telemetry\.host"):
        start(TelemetryConfig(host="192.0.2.1", port=free_ports()))
    with pytest.raises(UserError, match="exceeds 65535"):
        start(TelemetryConfig(port=65535), local_rank=1)


def test_close_releases_the_port(start: Start) -> None:
    config = TelemetryConfig(port=free_ports())
    for _ in range(2):
        exporter = start(config)
        scrape(exporter)
        exporter.close()
    with pytest.raises(urllib.error.URLError):
        scrape(exporter)


def test_only_metrics_and_health_are_served(start: Start) -> None:
    exporter = start()
    assert scrape(exporter, "/health") == "ok\n"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        scrape(exporter, "/")
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", data=b"x", timeout=5)
    with pytest.raises(ValueError, match="password"):
        Exporter(
            TelemetryConfig(),
            model_wide=True,
            local_rank=0,
            rank=0,
            info={**INFO, "password": "x"},
            model=TINY,
        )


def test_clients_that_hang_hold_up_neither_training_nor_others(start: Start) -> None:
    exporter = start()
    hanging = [socket.create_connection(("127.0.0.1", exporter.port)) for _ in range(50)]
    hanging[0].sendall(b"GET /metrics HTTP/1.1\r\n")  # and never the rest
    begun = time.perf_counter()
    for step in range(1, 1001):
        exporter.publish(record(step))
    assert time.perf_counter() - begun < 1.0
    assert value(exporter, "sgt_rank_step") == 1000
    begun = time.perf_counter()
    exporter.close()
    assert time.perf_counter() - begun < 2.0
    for connection in hanging:
        connection.close()


def test_a_hundred_scrapers_at_once_are_all_answered(start: Start) -> None:
    exporter = start()
    exporter.publish(record(7))
    answers: list[float] = []
    scrapers = [
        threading.Thread(target=lambda: answers.append(value(exporter, "sgt_rank_step")))
        for _ in range(100)
    ]
    for scraper in scrapers:
        scraper.start()
    for scraper in scrapers:
        scraper.join(30)
    assert answers == [7] * 100


def test_publishing_costs_no_more_than_a_thousandth_of_a_short_step(start: Start) -> None:
    exporter = start()
    value_of_step = record(1)
    rounds = []
    for _ in range(5):
        begun = time.thread_time()  # of this thread: other processes do not count
        for step in range(500):
            exporter.observe_step(step, 0.05, 1.0)
            exporter.publish(value_of_step)
        rounds.append((time.thread_time() - begun) / 500)
    assert min(rounds) < 0.001 * 0.05


def test_an_ipv6_address_can_be_served(start: Start) -> None:
    try:
        exporter = start(TelemetryConfig(host="::1", port=free_ports()))
    except UserError:
        pytest.skip("no IPv6 on this machine")
    with urllib.request.urlopen(f"http://[::1]:{exporter.port}/health", timeout=5) as answer:
        assert answer.read() == b"ok\n"


def test_a_failing_publication_is_told_once_and_training_goes_on(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = start()
    logging.getLogger("sgt_ds").propagate = True  # a test of the trainer may have changed it
    for _ in range(3):
        exporter.publish(None)  # type: ignore[arg-type]
        exporter.publish_decision("no such rule")
    assert len(caplog.records) == 2
    exporter.publish(record(5))
    assert value(exporter, "sgt_telemetry_failures_total") == 6
    assert value(exporter, "sgt_rank_step") == 5

    exporter.publish(record(6, entropy=[["not a number"]]))
    with pytest.raises(urllib.error.HTTPError, match="500"):
        scrape(exporter)
    exporter.publish(record(7))
    assert value(exporter, "sgt_telemetry_failures_total") == 7


def test_an_exporter_whose_thread_died_says_so(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = start()
    logging.getLogger("sgt_ds").propagate = True
    assert exporter._server is not None
    exporter._server._server.shutdown()
    for step in range(1, 4):
        exporter.observe_step(step, 0.1)
    assert [r.message for r in caplog.records if "no longer served" in r.message] != []
    assert len(caplog.records) == 1


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a CA, a server's and a client's certificate, and a stranger's."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is missing; run tests/install_services.sh")
    folder = tmp_path_factory.mktemp("tls")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)

    def authority_of(name: str) -> None:
        run(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", f"/CN={name}", "-keyout", f"{name}-key.pem", "-out", f"{name}.pem"),
            *("-addext", "keyUsage=critical,keyCertSign,digitalSignature"),
        )

    authority_of("ca")
    authority_of("stranger")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "renewed", "client"):
        run(
            *("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", f"{name}-key.pem", "-out", f"{name}.csr"),
        )
        run(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca-key.pem"),
            *("-CAcreateserial", "-days", "2", "-extfile", "san", "-out", f"{name}.pem"),
        )
    return folder


def tls_subject(exporter: Exporter, folder: Path, client: str | None) -> str:
    """Scrape over TLS; returns the common name of the server's certificate."""
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    if client is not None:
        context.load_cert_chain(folder / f"{client}.pem", folder / f"{client}-key.pem")
    with (
        socket.create_connection(("127.0.0.1", exporter.port), timeout=5) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1") as tls,
    ):
        subject = tls.getpeercert()
        tls.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        answer = b""
        while piece := tls.recv(65536):
            answer += piece
        assert b"sgt_run_info" in answer
    assert subject is not None
    return str(dict(pair for (pair,) in subject["subject"])["commonName"])  # type: ignore[misc]


def test_tls_serves_only_clients_that_the_ca_signed(start: Start, authority: Path) -> None:
    own = shutil.copy(authority / "server.pem", authority / "current.pem")
    key = shutil.copy(authority / "server-key.pem", authority / "current-key.pem")
    config = TelemetryConfig(
        port=free_ports(), certificate=own, private_key=key, client_ca=authority / "ca.pem"
    )
    exporter = start(config)
    # One that connects and never shakes hands must not keep the others out.
    with socket.create_connection(("127.0.0.1", exporter.port)):
        assert tls_subject(exporter, authority, "client") == "server"
        for stranger in (None, "stranger"):
            with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)):
                tls_subject(exporter, authority, stranger)
        with pytest.raises((urllib.error.URLError, ConnectionError, OSError)):
            scrape(exporter)  # plain HTTP
        # A certificate that is renewed on disk is served without a restart.
        shutil.copy(authority / "renewed.pem", own)
        shutil.copy(authority / "renewed-key.pem", key)
        assert tls_subject(exporter, authority, "client") == "renewed"


def test_a_certificate_that_does_not_load_is_one_clear_error(
    start: Start, authority: Path, tmp_path: Path
) -> None:
    wrong_key = authority / "client-key.pem"
    config = TelemetryConfig(
        port=free_ports(), certificate=authority / "server.pem", private_key=wrong_key
    )
    with pytest.raises(UserError, match=r"telemetry\.certificate"):
        start(config)
    absent = config.model_copy(
        update={"private_key": authority / "server-key.pem", "client_ca": tmp_path / "absent"}
    )
    with pytest.raises(UserError, match=r"telemetry\.client_ca"):
        start(absent)


def test_the_reference_page_is_what_the_table_says() -> None:
    page = Path(__file__).parent.parent / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8") == reference()


def test_the_stated_cardinality_is_that_of_a_real_scrape(start: Start) -> None:
    model = ModelConfig(
        hidden_size=1024, intermediate_size=8, num_layers=16, num_heads=16, vocab_size=8
    )
    for model_wide, host_wide in ((True, True), (False, True), (False, False)):
        exporter = start(model=model, model_wide=model_wide)
        exporter._snapshot = full_snapshot(16, 16, model_wide=model_wide, host_wide=host_wide)
        counted = series_of(model_wide=model_wide, host_wide=host_wide)
        assert len(series(scrape(exporter))) == counted


def test_the_peak_of_a_gpu_is_known_by_torchs_name_for_it() -> None:
    # Dense bf16 figures of the vendors' data sheets.
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A10") == 125e12
    assert peak_flops("NVIDIA GH200 480GB") == 989e12
    for unknown in (None, "", "NVIDIA A1000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Tesla V100"):
        assert peak_flops(unknown) is None


def test_a_metrics_row_is_json_even_where_the_loss_is_not_finite() -> None:
    row = record(5, loss=float("nan"), grad_norm=float("inf")).as_metrics_row()
    assert row["loss"] is None
    assert row["grad_norm"] is None
    assert list(row) == [
        *("step", "tokens", "loss", "learning_rate", "grad_norm", "step_seconds"),
        *("tokens_per_second", "flops", "overhead_ratio", "phase"),
    ]
