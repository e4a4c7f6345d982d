"""What `python -m ragged_attention bench` makes of results: tables, plots, comparisons, and the page in docs/."""

from __future__ import annotations

import copy
import json
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from ragged_attention import _cli
from ragged_attention._bench import compare, plots, report, results, run

ROOT = Path(__file__).resolve().parents[2]
PAGE_SCRIPT = ROOT / "scripts/performance_page"
RESULTS = ROOT / "benchmarks/results/h200.json"

needs_matplotlib = pytest.mark.skipif(not plots.has_matplotlib(), reason="matplotlib is not installed")

CEILINGS = {"matmul_tflops": 700.0, "copy_tbps": 4.0, "gather_tbps": 9.0}


def contestant(ms, seed, spread=0.005, count=30):
    rng = random.Random(seed)
    samples = [ms * (1 + rng.gauss(0, spread)) for _ in range(count)]
    return {"ms": sorted(samples)[count // 2], "samples_ms": samples}


def entry(name, op, floor_ms, over_floor, peers, share=None, head_dim=128, mask=None):
    ours = {"path": "cuda_sm90", **contestant(floor_ms * over_floor, name)}
    return {
        "op": op,
        "case": name,
        "dtype": "bfloat16",
        "head_dim": head_dim,
        "num_q_heads": 32,
        "num_kv_heads": 8,
        "mask": mask,
        "window": None,
        "share": share,
        "page_size": 128 if op == "qsa" else None,
        "ours": ours,
        "peers": {
            peer: {"error": times} if isinstance(times, str) else contestant(floor_ms * over_floor * times, peer + name)
            for peer, times in peers.items()
        },
        "floor_ms": floor_ms,
        "flops": round(floor_ms * 700e9) if op == "ragged" else 1000,
        "bytes": 1000 if op == "ragged" else round(floor_ms * 4e9),
        "max_abs_error": 1e-4,
    }


@pytest.fixture
def document():
    cases = [
        entry(
            f"ragged-{layout}-d{head_dim}-{label}",
            "ragged",
            floor,
            1.25,
            {"fa3": 1.1, "cudnn": 0.9, "fa2": "skipped: no such module"},
            head_dim=head_dim,
            mask=mask,
        )
        for head_dim in (64, 128)
        for layout, floor in (("1x16384", 4.0), ("4x4096", 1.0), ("32x512", 0.2))
        for label, mask in (("full", "null"), ("causal", "causal"))
    ]
    cases.append(
        entry("vision-1024x64-d80-full", "ragged", 0.157, 2.0, {"fa3": "wrong: nan"}, head_dim=80, mask="null")
    )
    cases += [
        entry(f"qsa-prefill-8192-at-32768-share{share}", "qsa", 0.8, 2.0, {"vllm": 3.0}, share=share)
        for share in (0.1, 0.5, 0.9)
    ]
    cases += [entry(f"qsa-decode-{rows}-at-32768", "qsa", 1e-3 * rows, 1.5, {"vllm": 2.0}) for rows in (1, 8, 64)]
    return {
        "device": "A GPU",
        "driver": "580.1",
        "versions": {"ragged_attention": "0.1.0", "torch": "2.11.0"},
        "commit": "0123456789abcdef",
        "dirty": False,
        "date": "2026-01-02T03:04:05+00:00",
        "ceilings": dict(CEILINGS),
        "cases": cases,
    }


@pytest.fixture
def file(tmp_path):
    def write(document, name="result.json"):
        path = tmp_path / name
        path.write_text(report.dumps(document), encoding="utf-8")
        return path

    return write


def slowed(document, factor, names=None, ceilings=1.0):
    """A later run, with other noise: `factor` times as long where asked for, on a device `ceilings` as fast."""
    later = copy.deepcopy(document)
    later["ceilings"] = {name: rate * ceilings for name, rate in CEILINGS.items()}
    for case in later["cases"]:
        old = document_case(document, case["case"])["ours"]["ms"]
        times = factor if names is None or case["case"] in names else 1.0
        case["ours"].update(contestant(old * times, "later" + case["case"]))
        case["floor_ms"] /= ceilings
    return later


def document_case(document, name):
    return next(case for case in document["cases"] if case["case"] == name)


def part_of(document, op, cases=slice(None)):
    """A run of some cases of one operation."""
    return {**document, "cases": [case for case in document["cases"] if case["op"] == op][cases]}


def verdicts(comparison):
    return {change.case: change.verdict for change in comparison.changes}


def bench(*arguments):
    return _cli.main(["bench", *map(str, arguments)])


def test_written_results_are_read_back_and_samples_are_on_one_line(document, file):
    path = file(document)
    assert report.load(path) == document
    assert len(path.read_text().splitlines()) < 60 * len(document["cases"])


@pytest.mark.parametrize(
    ("text", "says"), [("{", "not JSON"), ("[]", "not a result"), ('{"cases": []}', "not a result")]
)
def test_other_files_are_refused(tmp_path, capsys, text, says):
    path = tmp_path / "other.json"
    path.write_text(text)
    assert bench("--load", path) == 2
    assert says in capsys.readouterr().err
    assert bench("--load", tmp_path / "none.json") == 2
    assert "cannot be read" in capsys.readouterr().err


def test_reading_showing_and_comparing_results_imports_no_framework(document, file):
    path = file(document)
    code = (
        "import sys; from ragged_attention._cli import main; from ragged_attention._bench import plots;"
        f"main(['bench', '--load', {str(path)!r}, '--compare', {str(path)!r}]);"
        "print(sorted({'torch', 'jax', 'cupy', 'triton'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_tables_are_by_operation_with_the_peers_that_ran(document):
    ragged, qsa = report.result_tables(document)
    assert ragged.columns == ("case", "path", "ms", "rate", "of floor", "fa3", "cudnn")
    assert qsa.columns[-1] == "vllm"
    first = dict(zip(ragged.columns, ragged.rows[0], strict=True))
    assert first["path"] == "cuda_sm90"
    assert first["rate"].endswith(" TFLOP/s")
    assert float(first["rate"].split()[0]) == pytest.approx(700 / 1.25, rel=0.02)
    assert first["of floor"] == "80%"
    assert float(first["fa3"]) == pytest.approx(1.1, abs=0.02)
    assert qsa.columns[:3] == ("case", "shared", "path")
    assert [row[1] for row in qsa.rows] == ["10%", "50%", "90%", "", "", "", ""]
    assert qsa.rows[0][4].endswith(" TB/s")
    assert "Under shared" in qsa.note
    assert "Under shared" not in ragged.note
    assert ragged.rows[-1][0] == "geometric mean"
    assert ragged.note.count("fa2") == 1  # once, however many cases skipped it
    assert "no such module" in ragged.note
    assert dict(zip(ragged.columns, ragged.rows[-2], strict=True))["fa3"] == "wrong"


def test_host_costs_have_tables_of_their_own(document):
    assert len(report.result_tables(document)) == 2
    no_jax = "RuntimeError: jax finds no such device. Known are others"
    document["host_us"] = {
        "qsa": {"torch": 20.83, "jax": no_jax, "torch, out=": 15.48},
        "ragged": {"torch": 19.2, "cupy": 31.27, "jax": no_jax, "torch, out=": 13.17},
    }
    case = document_case(document, "qsa-decode-8-at-32768")
    case["ours"]["host_us"], case["peers"]["vllm"]["host_us"] = 17.88, 1132.1
    by_framework, by_case = report.result_tables(document)[2:]
    assert by_framework.columns == ("tensors", "ragged_flash_attention", "qsa_sparse_attention")
    assert by_framework.rows == [
        ("cupy", "31.3", "-"),
        ("jax", "-", "-"),
        ("torch", "19.2", "20.8"),
        ("torch, out=", "13.2", "15.5"),
    ]
    assert by_framework.note == "Not measured: jax: RuntimeError: jax finds no such device."
    assert by_case.columns == ("case", "ours", "vllm")
    assert by_case.rows == [("qsa-decode-8-at-32768", "17.9", "1132")]
    document["host_us"] = {}  # of a run that was stopped early
    assert [table.title for table in report.host_tables(results.merge([document]))] == [by_case.title]


def test_a_failed_case_is_in_the_table_and_in_the_notes(document):
    document["cases"][0]["ours"] = {"path": "cuda_sm90", "error": "RuntimeError: broken"}
    ragged = report.result_tables(document)[0]
    assert "failed" in ragged.rows[0]
    assert "RuntimeError: broken" in ragged.note


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123449, "0.01234"), (9.9996, "10.00"), (123.4, "123.4"), (99999.0, "99999"), (1e-7, "0.0000001000")],
)
def test_numbers_are_plain_decimals(value, text):
    assert report.significant(value, 4) == text


@needs_matplotlib
def test_plots_are_small_files_and_always_the_same(document, tmp_path):
    first = plots.write(results.merge([document]), tmp_path / "a")
    again = plots.write(results.merge([document]), tmp_path / "b")
    assert {path.stem for path, _ in first} == {plot.name for plot in plots.PLOTS}
    for (path, caption), (other, _) in zip(first, again, strict=True):
        assert caption
        assert path.read_bytes() == other.read_bytes()
        assert path.stat().st_size < 200 * 1024
        assert path.read_text().startswith("<?xml")


@needs_matplotlib
def test_ids_in_plots_are_numbers_that_are_defined_once_each(document, tmp_path):
    for path, _ in plots.write(results.merge([document]), tmp_path):
        text = path.read_text()
        defined = re.findall(r' id="([mp]\d+)"', text)
        assert len(defined) == len(set(defined)) > 0
        assert set(re.findall(r"#([mp][0-9a-f]+)\b", text)) <= set(defined)


@needs_matplotlib
def test_plots_without_their_figures_are_left_out(document, tmp_path):
    document["cases"] = [document_case(document, "qsa-decode-8-at-32768")]
    assert [path.stem for path, _ in plots.write(results.merge([document]), tmp_path)] == ["qsa-workloads"]
    document["cases"] = []
    assert plots.write(results.merge([document]), tmp_path) == []


# --- Several runs.


def renewed(document):
    """A later run of the same cases, in half the time, on a device that is 10 % slower."""
    new = slowed(document, 0.5, ceilings=1 / 1.1)
    new.update(date="2026-02-03T04:05:06+00:00", commit="fedcba9876543210", driver="590.2")
    return new


@pytest.mark.parametrize("order", [1, -1])
def test_of_each_case_the_newest_run_counts_as_a_whole(document, order):
    new = part_of(renewed(document), "ragged", slice(2, 5))
    before = copy.deepcopy([document, new])
    merged = results.merge([document, new][::order])
    assert [document, new] == before  # they are not written to
    assert [case["case"] for case in merged["cases"]] == [case["case"] for case in document["cases"]]
    assert [(run["number"], run["driver"]) for run in merged["runs"]] == [(1, "590.2"), (2, "580.1")]
    assert all({"cases", "host_us"}.isdisjoint(run) for run in merged["runs"])
    again = {case["case"]: case for case in new["cases"]}
    for case in merged["cases"]:
        name = case["case"]
        source = again.get(name) or document_case(document, name)
        assert {key: value for key, value in case.items() if key not in ("run", "older")} == source
        assert case["run"] is merged["runs"][0 if name in again else 1]
        assert case["older"] == (case["op"] == "ragged" and name not in again)  # all of QSA is of one run


def test_a_run_that_nothing_counts_of_any_more_is_left_out(document):
    new = renewed(document)
    merged = results.merge([document, new])
    assert [run["commit"] for run in merged["runs"]] == [new["commit"]]
    assert not any(case["older"] for case in merged["cases"])
    document["host_us"], new["host_us"] = {"ragged": {"torch": 2.0}, "qsa": {"torch": 3.0}}, {"ragged": {"torch": 1.0}}
    merged = results.merge([document, new])
    assert merged["host_us"] == {"ragged": {"torch": 1.0}, "qsa": {"torch": 3.0}}
    assert {op: run["number"] for op, run in merged["host_runs"].items()} == {"ragged": 1, "qsa": 2}


def test_new_cases_come_last_and_a_new_failure_counts(document):
    new = renewed(part_of(document, "ragged", slice(2)))
    new["cases"][0]["ours"] = {"path": "cuda_sm90", "error": "wrong: nan"}
    new["cases"][1]["case"] = "new"
    merged = results.merge([document, new])
    assert merged["cases"][-1]["case"] == "new"
    assert merged["cases"][0]["ours"]["error"] == "wrong: nan"


def test_results_of_different_devices_are_not_merged(document):
    with pytest.raises(results.NotComparable, match="A GPU, another"):
        results.merge([document, {**document, "device": "another"}])


def test_a_table_of_several_runs_says_which_row_is_whose(document):
    new = renewed(part_of(document, "ragged", slice(3)))
    new["ceilings"]["copy_tbps"] = 1e-9  # now the bytes give the floor
    merged = results.merge([document, new])
    table = report.operation_table("ragged", report.by_operation(merged)["ragged"])
    assert table.columns[:3] == ("case", "run", "path")
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert [row[1] for row in table.rows] == ["1"] * 3 + ["2"] * 10 + ["", ""]
    assert [row[4].split()[1] for row in table.rows[:4]] == ["TB/s"] * 3 + ["TFLOP/s"]  # each by its own ceilings
    assert [row[0] for row in table.rows[-2:]] == ["geometric mean of run 1", "geometric mean of run 2"]
    of_floor = table.columns.index("of floor")
    assert table.rows[0][of_floor] == report.percent(new["cases"][0]["floor_ms"] / new["cases"][0]["ours"]["ms"])
    assert table.rows[-2][of_floor] != table.rows[-1][of_floor]
    whole = report.operation_table("qsa", report.by_operation(merged)["qsa"])
    assert whole.columns[:3] == ("case", "shared", "path")
    assert whole.rows[-1][0] == "geometric mean"


def test_host_costs_of_several_runs_say_whose_they_are(document):
    document["host_us"] = {"ragged": {"torch": 19.2}, "qsa": {"torch": 20.83}}
    for case in document["cases"][:1] + document["cases"][-1:]:
        case["ours"]["host_us"] = 17.88
    new = renewed(part_of(document, "ragged"))
    new["host_us"] = {"ragged": {"torch": 9.2}}
    by_framework, by_case = report.host_tables(results.merge([document, new]))
    assert by_framework.rows == [("run", "1", "2"), ("torch", "9.20", "20.8")]
    assert by_case.columns[:3] == ("case", "run", "ours")
    assert [row[1] for row in by_case.rows] == ["1", "2"]


@needs_matplotlib
def test_plots_mark_the_cases_of_an_older_run(document, tmp_path):
    runs = {
        "one": [document],
        "new": [document, renewed(part_of(document, "ragged"))],
        "some": [document, renewed(part_of(document, "ragged", slice(3)))],
    }
    for name, documents in runs.items():
        plots.write(results.merge(documents), tmp_path / name)
    for plot in plots.PLOTS:
        one, new, some = ((tmp_path / name / f"{plot.name}.svg").read_text() for name in runs)
        of_ragged = plot.name.startswith("ragged")
        assert (new != one) == (some != one) == of_ragged
        assert white_dots(one) == white_dots(new) == 0
        assert (white_dots(some) > 0) == of_ragged


def white_dots(svg):
    return svg.count('style="fill: #ffffff; stroke: #ffffff"')


# --- Comparing.


def test_noise_is_not_flagged(document):
    comparison = compare.compare(document, slowed(document, 1.0))
    assert set(verdicts(comparison).values()) == {compare.SAME}
    assert not comparison.got_slower


def test_what_got_slower_and_faster_is_flagged(document):
    later = slowed(document, 1.1, {"qsa-decode-8-at-32768"})
    faster = document_case(later, "vision-1024x64-d80-full")["ours"]
    faster.update(contestant(0.8 * faster["ms"], "faster"))
    comparison = compare.compare(document, later)
    found = {name: verdict for name, verdict in verdicts(comparison).items() if verdict != compare.SAME}
    assert found == {"qsa-decode-8-at-32768": compare.SLOWER, "vision-1024x64-d80-full": compare.FASTER}
    assert comparison.got_slower
    assert [row[1] for row in compare.as_table(comparison).rows] == [compare.SLOWER, compare.FASTER]


def test_a_slower_device_is_not_our_doing(document):
    comparison = compare.compare(document, slowed(document, 1.1, ceilings=1 / 1.1))
    assert set(verdicts(comparison).values()) == {compare.UNCLEAR}
    assert not comparison.got_slower
    worse = compare.compare(document, slowed(document, 1.3, ceilings=1 / 1.1))
    assert set(verdicts(worse).values()) == {compare.SLOWER}


def test_wide_samples_alone_are_no_change(document):
    later = copy.deepcopy(document)
    for case in later["cases"]:
        case["ours"].update(contestant(case["ours"]["ms"], case["case"] + "wide", spread=0.2))
    assert compare.SLOWER not in verdicts(compare.compare(document, later)).values()


def test_failures_changed_cases_and_few_samples(document):
    later = slowed(document, 1.0)
    later["cases"][0]["ours"] = {"path": "cuda_sm90", "error": "wrong: nan"}
    later["cases"][1]["flops"] *= 2
    later["cases"][2]["ours"].update(contestant(100.0, "few", count=3))
    del later["cases"][3]
    comparison = compare.compare(document, later)
    assert [change.verdict for change in comparison.changes[:3]] == [compare.BROKEN, compare.UNCLEAR, compare.UNCLEAR]
    assert comparison.got_slower
    assert any(document["cases"][3]["case"] in note for note in comparison.notes)


def test_a_run_of_one_operation_is_compared_with_one_of_both(document, file, capsys):
    later = part_of(slowed(document, 1.2, {"vision-1024x64-d80-full"}), "ragged")
    comparison = compare.compare(document, later)
    assert [change.case for change in comparison.of(compare.SLOWER)] == ["vision-1024x64-d80-full"]
    assert len(comparison.changes) == len(later["cases"]) < len(document["cases"])
    assert any(note.startswith("6 only in the old result: qsa-prefill") for note in comparison.notes)
    assert bench("--compare", file(document, "old.json"), file(later, "later.json")) == 1
    assert "1 slower" in capsys.readouterr().out


def test_exit_statuses_of_compare(document, file, capsys):
    old, same = file(document, "old.json"), file(slowed(document, 1.0), "same.json")
    slow = file(slowed(document, 1.2, {"qsa-decode-1-at-32768"}), "slow.json")
    assert bench("--compare", old, same) == 0
    assert "the same within noise" in capsys.readouterr().out
    assert bench("--compare", old, slow) == 1
    assert "qsa-decode-1-at-32768" in capsys.readouterr().out
    assert bench("--load", slow, "--compare", old) == 1
    assert bench("--compare", old, slow, "--tolerance", 40) == 0
    elsewhere = file({**document, "device": "another"}, "elsewhere.json")
    capsys.readouterr()
    assert bench("--compare", old, elsewhere) == 2
    assert "another" in capsys.readouterr().err
    assert bench("--compare", old, same, slow) == 2


# --- Comparing with a result that a GPU gave, whose samples drift and have outliers.

needs_results = pytest.mark.skipif(not RESULTS.exists(), reason="no results are committed")


def measured_again(document, factors, seed=0):
    """A later run, of samples drawn from those of `document`: `factors` times as long where asked for."""
    rng = random.Random(seed)
    later = copy.deepcopy(document)
    for case in later["cases"]:
        drawn = rng.choices(case["ours"]["samples_ms"], k=len(case["ours"]["samples_ms"]))
        drawn = [factors.get(case["case"], 1.0) * ms for ms in drawn]
        case["ours"].update(ms=statistics.median(drawn), samples_ms=drawn)
    return later


def of_steady_cases(document):
    """Those whose samples say something: 10 % are beyond the spread of the middle 80 %."""
    steady = []
    for case in document["cases"]:
        samples = sorted(case["ours"].get("samples_ms", ()))
        if len(samples) >= 20 and samples[int(0.9 * len(samples))] < 1.05 * samples[int(0.1 * len(samples))]:
            steady.append(case["case"])
    return steady


def heading(capsys):
    """How many cases are what; those of few samples are unclear, in whatever result is committed."""
    printed = " ".join(capsys.readouterr().out.split())
    found = re.search(r"Against the old result: (.*?the same within noise)", printed)
    return re.sub(r"\d+ unclear, ", "", re.sub(r"\d+ the same", "the same", found[1])), printed


@needs_results
def test_a_measured_result_compared_with_itself(capsys):
    assert bench("--compare", RESULTS, RESULTS) == 0
    assert heading(capsys)[0] == "the same within noise"


@needs_results
@pytest.mark.parametrize("seed", range(3))
def test_a_slower_case_is_found_in_a_measured_result(file, capsys, seed):
    document = report.load(RESULTS)
    steady = of_steady_cases(document)
    assert len(steady) > len(document["cases"]) / 2
    slow = random.Random(seed).choice(steady)
    again = file(measured_again(document, {}, seed), "again.json")
    assert bench("--compare", RESULTS, again) == 0
    assert heading(capsys)[0] == "the same within noise"
    slower = file(measured_again(document, {slow: 1.1}, seed), "slower.json")
    assert bench("--compare", RESULTS, slower) == 1
    found, printed = heading(capsys)
    assert found == "1 slower, the same within noise"
    assert f"{slow} slower" in printed
    assert bench("--compare", slower, RESULTS) == 0  # faster is no reason to fail
    assert heading(capsys)[0] == "1 faster, the same within noise"


@needs_results
def test_a_quick_run_is_compared_with_a_measured_result_of_all_cases(file, capsys):
    document = report.load(RESULTS)
    chosen = [case["name"] for case in run.list_cases("cuda", quick=True)]
    kept = [case for case in document["cases"] if case["case"] in chosen]
    assert 10 < len(kept) < len(document["cases"])
    part = {**document, "cases": kept}
    slow = of_steady_cases(part)[0]
    assert bench("--compare", RESULTS, file(measured_again(part, {}), "quick.json")) == 0
    found, printed = heading(capsys)
    assert found == "the same within noise"
    assert f"{len(document['cases']) - len(kept)} only in the old result" in printed
    assert bench("--compare", RESULTS, file(measured_again(part, {slow: 1.1}), "slower.json")) == 1
    assert heading(capsys)[0] == "1 slower, the same within noise"


@needs_matplotlib
def test_loaded_results_are_shown_plotted_and_given_as_json(document, file, tmp_path, capsys):
    again = tmp_path / "again.json"
    assert bench("--load", file(document), "--plots", tmp_path / "plots", "--json", again) == 0
    printed = capsys.readouterr().out
    assert "geometric mean" in printed
    assert "ragged-lengths.svg" in printed
    assert json.loads(again.read_text()) == document


def test_plots_without_matplotlib_name_the_extra(document, file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plots, "has_matplotlib", lambda: False)
    assert bench("--load", file(document), "--plots", tmp_path / "plots") == 2
    assert "[bench]" in capsys.readouterr().err


def test_the_list_of_cases_and_an_unknown_one(capsys):
    pytest.importorskip("torch")
    assert bench("--list", "--quick") == 0
    assert "vision-1024x64-d80-full" in capsys.readouterr().out
    assert bench("--cases", "no-such-case") == 2
    assert "no-such-case" in capsys.readouterr().err


def test_the_cases_of_one_operation(capsys):
    names = {op: [case["name"] for case in run.list_cases("cuda", op=op)] for op in ("ragged", "qsa")}
    assert sorted(names["ragged"] + names["qsa"]) == sorted(case["name"] for case in run.list_cases("cuda"))
    assert bench("--list", "--op", "qsa") == 0
    listed = capsys.readouterr().out
    assert f"{len(names['qsa'])} cases" in listed
    assert all(name in listed for name in names["qsa"])
    assert "vision-" not in listed
    assert bench("--list", "--op", "ragged", "--quick") == 0
    listed = capsys.readouterr().out
    assert f"{len(run.list_cases('cuda', quick=True, op='ragged'))} cases" in listed
    assert "qsa-" not in listed
    assert bench("--list", "--op", "qsa", "--device", "cpu") == 2
    assert "no case of qsa" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench("--op", "qsa", "--cases", "vision-1024x64-d80-full")


def test_one_operation_is_run(document, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    given = []
    monkeypatch.setattr(run, "run", lambda names, **_: given.extend(names) or part_of(document, "qsa"))
    assert bench("--op", "qsa", "--quick", "--out", tmp_path / "qsa.json") == 0
    assert given == [case["name"] for case in run.list_cases("cuda", quick=True, op="qsa")]


def page(*arguments):
    command = [sys.executable, str(PAGE_SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


needs_script = pytest.mark.skipif(not PAGE_SCRIPT.exists(), reason="scripts/ is not in this tree")


@needs_matplotlib
@needs_script
def test_the_page_is_made_and_checked(document, file, tmp_path):
    document["host_us"] = {"ragged": {"torch": 19.2}}
    results, docs = file(document), tmp_path / "docs"
    assert page("--results", results, "--docs", docs).returncode == 0
    text = (docs / "performance.md").read_text()
    assert "A GPU" in text
    assert "no such module" in text
    assert "## Host cost of an eager call" in text
    assert "| torch | 19.2 |" in text
    assert "| qsa-prefill-8192-at-32768-share0.9 | 90% | cuda_sm90 |" in text
    for plot in plots.PLOTS:
        assert f"(performance/{plot.name}.svg)" in text
        assert (docs / "performance" / f"{plot.name}.svg").exists()
    assert page("--check", "--results", results, "--docs", docs).returncode == 0
    (docs / "performance.md").write_text(text.replace("80%", "90%", 1))
    (docs / "performance" / "old.svg").write_text("<svg/>")
    stale = page("--check", "--results", results, "--docs", docs)
    assert stale.returncode == 1
    assert "performance.md is not up to date" in stale.stderr
    assert "old.svg is of other results" in stale.stderr


@needs_matplotlib
@needs_script
@needs_results
def test_the_page_of_several_runs_says_what_is_whose(file, tmp_path):
    document = report.load(RESULTS)
    new = renewed_on_hopper(document)
    whole = file(part_of(new, "ragged"), "h200-ragged.json")
    part = file(part_of(new, "ragged", slice(9)), "h200-9.json")
    docs = tmp_path / "docs"

    assert page("--results", RESULTS, whole, "--docs", docs).returncode == 0
    text = (docs / "performance.md").read_text()
    ragged, qsa = text.split("\n## ")[2:4]
    counts = {op: len(cases) for op, cases in report.by_operation(document).items()}
    head = text.partition("## Method")[0]
    assert "|  | run 1 | run 2 |" in head
    assert "[h200-ragged.json](../benchmarks/results/h200-ragged.json) | [h200.json](" in head
    assert f"| {counts['ragged']} of ragged_flash_attention | {counts['qsa']} of qsa_sparse_attention |" in head
    assert f"| {report.describe_ceilings(new)} | {report.describe_ceilings(document)} |" in head
    assert "torch 9.9" in head
    assert "From run 1 (commit fedcba9876543210, 2099-02-03T04:05:06+00:00, driver 999.9;" in ragged
    assert f"From run 2 (commit {document['commit']}, {document['date']}, driver {document['driver']};" in qsa
    assert "Older" not in text
    assert "| run |" not in ragged + qsa
    assert ragged.count("| cuda_sm90 |") == counts["ragged"]
    assert all(f"`{path}`" in text for path in ("cuda_sm90", "cuda_portable"))
    assert page("--check", "--results", RESULTS, whole, "--docs", docs).returncode == 0
    assert page("--check", "--results", whole, RESULTS, "--docs", docs).returncode == 0
    stale = page("--check", "--results", RESULTS, part, "--docs", docs)
    assert stale.returncode == 1
    assert "performance.md is not up to date" in stale.stderr
    assert "ragged-head-dims.svg is not up to date" in stale.stderr
    assert "qsa-workloads.svg" not in stale.stderr

    assert page("--results", RESULTS, part, "--docs", docs).returncode == 0
    ragged, qsa = (docs / "performance.md").read_text().split("\n## ")[2:4]
    assert "From run 1 (commit fedcba9876543210" in ragged
    assert f"**Older**, and maybe of other code, are {counts['ragged'] - 9} of the {counts['ragged']} cases" in ragged
    assert "| case | run | path |" in ragged
    assert len(re.findall(r"^\| [\w-]+ \| 1 \| cuda_sm90 \|", ragged, re.MULTILINE)) == 9
    assert len(re.findall(r"^\| [\w-]+ \| 2 \| cuda_", ragged, re.MULTILINE)) == counts["ragged"] - 9
    assert "Older" not in qsa

    elsewhere = file({**document, "device": "another"}, "elsewhere.json")
    refused = page("--results", RESULTS, elsewhere, "--docs", docs)
    assert refused.returncode == 2
    assert "different devices" in refused.stderr


def renewed_on_hopper(document):
    """All cases on the Hopper path, in half the time, on a slower device, with other versions."""
    new = copy.deepcopy(document)
    new.update(date="2099-02-03T04:05:06+00:00", commit="fedcba9876543210", driver="999.9")
    new["versions"]["torch"] = "9.9"
    new["ceilings"] = {name: rate / 1.1 for name, rate in new["ceilings"].items()}
    for case in new["cases"]:
        case["floor_ms"] *= 1.1
        case["ours"]["path"] = "cuda_sm90"
        case["ours"]["ms"] *= 0.5
    return new


@needs_matplotlib
@needs_script
@needs_results
def test_the_committed_page_is_up_to_date():
    check = page("--check")
    assert check.returncode == 0, check.stderr
