"""The example of an offline job: what it makes is an input of the model it names."""

from __future__ import annotations

from pathlib import Path

from examples.batch.make_files import make_files
from weir.jobs.formats.files import open_input
from weir.repository.config_text import parse_config

CONFIG = Path(__file__).parents[4] / "weir/demo/models/file_features/config.pbtxt"


def test_what_the_example_makes_is_an_input_of_its_model(tmp_path: Path) -> None:
    make_files(tmp_path, 1005)
    given = open_input([tmp_path], None, parse_config(CONFIG.read_bytes(), CONFIG.name))
    assert given.count() == 1005
    items = list(given.items(998))
    assert [item.source for item in items[:3]] == ["0000/0000998.html", "0000/0000999.sh", "0001/0001000.py"]
    assert all(isinstance(item.inputs, list) and item.inputs[0].name == "FILE" for item in items)
