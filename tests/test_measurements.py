"""Files of measurements: whole, or refused by the name of what is wrong."""

import copy
import json

import pytest

import parlab as pl
from parlab import measurements
from parlab.distributed.gpu import __main__ as program
from parlab.distributed.gpu.machine import Machine
from parlab.gpu_prediction.cards import NAMES, data_sheet_name
from parlab.gpu_prediction.rows import PARTS, predicted_rows
from parlab.measurements import FIELDS, newest, read
from parlab.measurements import measurements as all_in

QUICK = ("training", "full fine-tuning", "host link", "fsdp", "products")


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """The file of a dry run, as a dict."""
    folder = tmp_path_factory.mktemp("dry")
    assert program.main(["--device", "cpu", "--out", str(folder), "--parts", *QUICK]) == 0
    (path,) = folder.iterdir()
    return json.loads(path.read_text())


@pytest.fixture
def record(dry):
    """The same as if it came from a card, for tests of what is accepted; it is kept nowhere."""
    return copy.deepcopy(dry) | {"device": "cuda", "card": "Test Card"}


def row(record, part, item):
    (found,) = [row for row in record["rows"] if (row["part"], row["item"]) == (part, item)]
    return found


def refused(record, *words, **options):
    with pytest.raises(ValueError) as error:
        read(record, **options)
    for word in words:
        assert word in str(error.value)


def test_a_dry_run_is_refused_as_a_measurement_of_a_card(dry):
    refused(dry, "device", "cuda", "dry run")
    assert read(dry, dry_run=True).device == "cpu"
    assert dry["card"] == "none (dry run)"


def test_a_whole_file_is_read_and_its_rows_are_those_that_were_written(record):
    measurement = read(json.dumps(record))
    assert measurement.card == "Test Card" and len(measurement.rows) == len(record["rows"])
    items = [row.item for row in measurement.part("products")]
    assert items == ["n = 64", "n = 128", "n = 256", "attention, 1 x 2 heads, 32 x 8"]
    assert measurement.value("training", "peak") == row(record, "training", "peak")["measured"]
    assert measurement.mean_peak_error == 0  # the tracker's bytes are the predicted ones
    with pytest.raises(ValueError, match="no such item"):
        measurement.value("training", "no such item")


@pytest.mark.parametrize("field", FIELDS)
def test_a_file_without_any_one_field_is_refused_by_its_name(record, field):
    del record[field]
    refused(record, field, "is missing")


CHANGES = {
    "empty text": (lambda r: r.update(driver=" "), "driver"),
    "number as text": (lambda r: r.update(card_bytes="8 GB"), "card_bytes"),
    "another schema": (lambda r: r.update(schema=2), "schema", "anew"),
    "local time": (lambda r: r.update(utc="2026-11-29 20:00"), "utc"),
    "half a commit": (lambda r: r.update(commit="abc123"), "commit"),
    "unknown field": (lambda r: r.update(note="fast"), "note", "unknown"),
    "part missing": (lambda r: r["skipped"].pop("ranks"), "ranks"),
    "part in both": (lambda r: r["skipped"].update(training="no"), "training", "both"),
    "unknown part": (lambda r: r["texts"].update(speed={}), "texts", "speed"),
    "no reason": (lambda r: r["skipped"].update(ranks=""), "ranks", "reason"),
    "rows no list": (lambda r: r.update(rows={}), "rows"),
    "no rows": (lambda r: r.update(rows=[]), "rows", "empty"),
    "row without a unit": (lambda r: r["rows"][0].pop("unit"), "rows[0]", "unit"),
    "row twice": (lambda r: r["rows"].append(r["rows"][0]), "training", "twice"),
    "row gone": (lambda r: r["rows"].pop(0), "training", "no row 'weights'"),
    "unknown row": (lambda r: r["rows"][0].update(item="mass"), "training"),
    "not measured": (lambda r: r["rows"][0].update(measured=None), "rows[0]", "measured"),
    "true measured": (lambda r: r["rows"][0].update(measured=True), "rows[0]", "measured"),
    "not finite": (lambda r: r["rows"][0].update(measured=float("nan")), "rows[0]", "measured"),
    "another unit": (lambda r: r["rows"][0].update(unit="GiB"), "weights", "bytes"),
    "less configuration": (
        lambda r: r["configurations"]["training"].pop("sequence"),
        "training",
        "sequence",
    ),
    "configuration of text": (
        lambda r: r["configurations"].update(training="b = 8"),
        "training",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_file_is_refused_by_the_name_of_what_changed(record, name):
    change, *words = CHANGES[name]
    change(record)
    refused(record, *words)


@pytest.mark.parametrize("was", [1, None])
def test_predictions_are_todays_and_what_was_predicted_otherwise_is_named(record, was, capsys):
    written = read(record)
    assert written.changed == ()
    record["rows"][0].update(predicted=was)
    measurement = read(record)
    assert measurement.rows == written.rows
    assert measurement.changed == ("training, weights",)
    measurement.show("training")
    assert "predicted otherwise when it was measured: weights" in capsys.readouterr().out


def test_another_configuration_is_given_away_by_what_was_predicted(record):
    record["configurations"]["training"].update(micro_batch=1)
    assert "training, peak" in read(record).changed


def test_a_later_model_does_not_make_a_measurement_worthless(record, monkeypatch):
    today = predicted_rows("training", record["configurations"]["training"])

    def other_model(part, configuration):
        unit, value = today["peak"]
        changed = today | {"peak": type(today["peak"])(unit, value + 1)}
        return changed if part == "training" else predicted_rows(part, configuration)

    monkeypatch.setattr(measurements, "predicted_rows", other_model)
    measurement = read(record)
    assert measurement.changed == ("training, peak",)
    assert measurement.value("training", "peak") == row(record, "training", "peak")["measured"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '"text"'])
def test_what_is_no_json_object_is_refused(text):
    refused(text, "the file")


def test_the_newest_file_of_a_card_is_found_by_its_own_time_not_by_its_name(record, tmp_path):
    times = {"c": "2026-01-01T00:00:00Z", "a": "2026-03-01T00:00:00Z", "b": "2026-02-01T00:00:00Z"}
    for name, utc in times.items():
        changed = record | {"utc": utc, "card": f"X{name}"}
        (tmp_path / f"{name}.json").write_text(json.dumps(changed))
    assert [each.card for each in all_in(tmp_path)] == ["Xc", "Xb", "Xa"]
    assert newest(folder=tmp_path).card == "Xa"
    assert newest("xB", tmp_path).utc == times["b"]
    assert newest("T4", tmp_path) is None


def test_a_refused_file_in_the_folder_is_named(record, tmp_path):
    (tmp_path / "broken.json").write_text(json.dumps(record | {"utc": "yesterday"}))
    with pytest.raises(ValueError, match="broken.json: utc"):
        newest(folder=tmp_path)


def test_a_folder_that_is_not_there_holds_no_measurements(tmp_path):
    assert all_in(tmp_path / "none") == [] and newest(folder=tmp_path / "none") is None


def test_your_own_measurements_stand_beside_those_of_the_package(record, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ours = all_in()
    assert ours == all_in(measurements.OURS)
    for folder in (tmp_path / "measurements", tmp_path / "notebooks"):
        folder.mkdir()
    (tmp_path / "measurements" / "mine.json").write_text(json.dumps(record))
    monkeypatch.chdir(tmp_path / "notebooks")  # where a notebook runs
    assert [each.card for each in all_in()].count("Test Card") == 1
    assert len(all_in()) == len(ours) + 1


def test_the_packages_own_files_are_whole_from_a_card_and_close_to_their_predictions():
    ours = all_in(measurements.OURS)
    assert ours and {each.device for each in ours} == {"cuda"}
    for each in ours:
        assert len(each.commit) == 40
        assert each.mean_peak_error < 0.05


def test_errors_are_relative_to_what_was_measured_and_none_where_a_side_is_nothing(capsys, record):
    error = measurements.Row("p", "i", "bytes", 110, 100).error
    assert error == 0.1
    assert measurements.Row("p", "i", "bytes", None, 100).error is None
    assert measurements.Row("p", "i", "absolute", 0, 1e-15).error is None
    read(record).show("products")
    assert capsys.readouterr().out.splitlines()[0].startswith("Test Card, 2")


def test_an_unknown_part_or_a_configuration_without_something_is_named():
    with pytest.raises(ValueError, match="training"):
        predicted_rows("trainign", {})
    for part in PARTS:
        if part != "host link":  # which predicts nothing
            with pytest.raises(ValueError, match=part):
                predicted_rows(part, {})


@pytest.mark.parametrize(
    "card, name",
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", None),  # another memory: no row
        ("NVIDIA H200", "h200"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA GeForce RTX 3070", None),
    ],
)
def test_a_cards_own_name_finds_its_row_of_the_data_sheet(card, name):
    assert data_sheet_name(card) == name


def test_every_name_of_a_card_has_a_row():
    for name in NAMES.values():
        assert pl.gpu(name).name == name


def test_a_machine_says_need_and_have():
    from parlab.distributed.gpu.machine import Skipped

    with pytest.raises(Skipped, match=r"needs 2\.00 GB .* 0\.90 GB can be used"):
        Machine("cpu", 10**9).require(2 * 10**9)


def test_one_part_alone_is_shown_without_its_name_and_several_with_theirs(capsys, record):
    read(record).show("products")
    _, head, first, *_ = capsys.readouterr().out.splitlines()
    assert head.split() == ["item", "predicted", "measured", "error"]
    assert first.startswith("n = 64 ")
    read(record).show("products", "training")
    _, head, first, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "part" and first.split()[0] == "training"
