"""What the command of the parallel benchmark refuses."""

import pytest
from click.testing import CliRunner

from mpips.parallel.bench.__main__ import command
from tests.mpi.mpips.mlp.support import COMM, same_everywhere


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--width", "x"], "'x' must be numbers of at least 1"),
        (["--batch", "0"], "'0' must be numbers of at least 1"),
        (["--batch", "100,"], "'100,' must be numbers of at least 1"),
        (["--grid", "foo"], "grid 'foo' must be BATCHxMODEL"),
        (["--grid", "7x77"], "needs 539 ranks"),
    ],
)
def test_words_that_make_no_benchmark_are_refused_as_such(words, sentence):
    result = CliRunner().invoke(command, words)
    assert same_everywhere(result.exit_code == 2), result.output
    assert COMM.rank or sentence in " ".join(result.output.split())
