"""The compiler of the tests gives no object that was made of something else."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cpu_libraries import COMPILE_ONCE

CC = shutil.which("cc")


@pytest.mark.skipif(CC is None, reason="needs a C compiler")
def test_what_is_compiled_already_is_copied_and_whatever_differs_is_not(tmp_path: Path) -> None:
    kept, source, header = tmp_path / "kept", tmp_path / "it.c", tmp_path / "it.h"
    source.write_text('#include "it.h"\n#ifdef LOUD\nint it(void) { return 1; }\n#endif\n')
    header.write_text("int one(void) { return 1; }\n")

    def compile_it(*flags: str) -> bytes:
        words = [sys.executable, "-ISs", str(COMPILE_ONCE), str(kept), CC, "-O2", *flags, "-c", str(source)]
        subprocess.run(words, cwd=tmp_path, check=True)
        return (tmp_path / "it.o").read_bytes()

    def num_kept() -> int:
        return len(list(kept.glob("*.o")))

    first = compile_it()
    assert (compile_it(), num_kept()) == (first, 1)
    assert (compile_it("-DQUIET"), num_kept()) == (first, 1)
    assert (compile_it("-DLOUD") != first, num_kept()) == (True, 2)
    assert (compile_it("-O0") != first, num_kept()) == (True, 3)
    header.write_text("int one(void) { return 2; }\n")
    assert (compile_it() != first, num_kept()) == (True, 4)
    source.write_text("int it(void) { return }\n")
    with pytest.raises(subprocess.CalledProcessError):
        compile_it()
    assert num_kept() == 4
