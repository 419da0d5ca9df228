"""Code by value keeps its file's name and its source lines, wherever it is loaded."""

import linecache
import pickle
import textwrap
from functools import partialmethod
from typing import Any

import pytest

from greenroom.actors.replica.modules import users_traceback
from greenroom.actors.replica.pickling import ByValuePickler, dumps
from greenroom.serve.code.packing import pack_arguments, pack_code
from tests.support.programs import python

SCRIPT = """
import sys
from greenroom.serve.code.packing import pack_code

def main(answer):
    class Local:
        def __call__(self):
            return [1 / answer for _ in range(1)]  # a frame of its own

    return Local

if sys.argv[2] == "closure":
    target = main(0)
else:
    class target:
        def __call__(self):
            return 1 / 0  # of __main__

open(sys.argv[1], "wb").write(pack_code("it", target, (), {}, None).pickled)
"""
LOAD = """
import inspect, pickle, sys
from greenroom.actors.replica.modules import users_traceback
target, _, _ = pickle.load(open(sys.argv[1], "rb"))
print(inspect.getsource(target.__call__))
try:
    target()()
except ZeroDivisionError as error:
    print(users_traceback(error))
"""


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("closure", "return [1 / answer for _ in range(1)]  # a frame of its own"),
        ("main", "return 1 / 0  # of __main__"),
    ],
)
def test_a_traceback_shows_the_lines_that_run_and_not_those_of_the_file_by_now(
    tmp_path, kind, line
):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    python(script, tmp_path / "code", kind)
    if kind == "closure":
        script.unlink()
    else:
        script.write_text(SCRIPT.replace(line, "return 2 / 0  # edited"))
    output = python("-c", LOAD, tmp_path / "code")
    assert output.count(line) >= 2, output  # in getsource and in the traceback
    assert f'File "{script}", line ' in output
    assert "edited" not in output


def cell(source, number):
    """Define what a notebook's cell does: its lines are in linecache alone."""
    name = f"/tmp/ipykernel_1/{number}.py"
    text = textwrap.dedent(source)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), names)  # as IPython does
    return name, names


def test_a_notebooks_cell_travels_with_its_lines():
    name, names = cell("def fails():\n    raise LookupError('cell')\n", 1)
    pickled = pack_code("it", names["fails"], (), {}, None).pickled
    del linecache.cache[name]
    with pytest.raises(LookupError) as caught:
        pickle.loads(pickled)[0]()
    found = users_traceback(caught.value)
    assert f"File \"{name}\", line 2, in fails\n    raise LookupError('cell')" in found
    assert "pickling.py" not in found


def test_the_same_cell_run_again_is_the_same_code():
    source = "def fails():\n    raise LookupError('cell')\n"
    first, again = (cell(source, number)[1]["fails"] for number in (2, 3))
    assert pack_code("it", first, (), {}, None).hash == pack_code("it", again, (), {}, None).hash


def test_what_a_call_takes_has_the_files_name_but_not_its_text():
    name, names = cell("secret = 'in the file'\nfails = lambda: 1 / 0\n", 4)
    for pickled in (pack_arguments("it", (names["fails"],), {}), dumps(((names["fails"],), {}))):
        assert b"in the file" not in pickled
        (fails,), _ = pickle.loads(pickled)
        assert fails.__code__.co_filename == name


def test_a_partial_method_is_made_as_it_was():
    """Not by ``__new__`` without arguments, which Python 3.14 refuses."""
    method: Any = partialmethod(divmod, 7, other=1)
    method.mark = 3
    make, arguments, _ = ByValuePickler().reducer_override(method)
    for made in (make(*arguments), pickle.loads(dumps(method))):
        assert (made.func, made.args, made.keywords) == (divmod, (7,), {"other": 1})
    assert made.mark == 3
