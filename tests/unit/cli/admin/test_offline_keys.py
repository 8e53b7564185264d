from pathlib import Path

import pytest
import rich_click as click

from loraserve.cli.admin.offline_keys import create_offline

BODY = {"role": "admin", "tenant": None, "name": "", "adapters": None, "limits": {}, "expires_in_s": None}


def test_a_directory_that_cannot_be_written_is_said_in_a_line(tmp_path: Path) -> None:
    assert create_offline(tmp_path, BODY)["role"] == "admin"
    keys = tmp_path / "docs" / "key"
    keys.rename(tmp_path / "aside")
    keys.write_text("")
    with pytest.raises(click.ClickException, match="cannot be used: Not a directory"):
        create_offline(tmp_path, BODY)
