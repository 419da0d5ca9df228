"""Equal code has an equal fingerprint in every process, and other code another one."""

import copy
import functools
import importlib
import importlib.util
import json
import xml

import pytest

from greenroom.serve.code.fingerprint import fingerprint
from tests.support.programs import python

HEAD = """
import abc, collections, dataclasses, datetime, enum, functools, re, sys, typing, uuid, weakref
from typing import *
import pydantic
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, TypeAdapter
from pydantic import computed_field, field_validator, model_validator
from typing_extensions import TypedDict as PydanticTypedDict

"""

# What is deployed is ``made``; each pair is a change that makes it other code.
CASES = {
    "function": (
        """
def made(x, y=1): return x + y
""",
        [("x + y", "x - y"), ("y=1", "y=2"), ("made(x, y=1)", "made(x: int, y=1)")],
    ),
    "closures": (
        """
def outer(n, s):
    def inner(x=n, *, k={"a", "b", "c"}): return x, s, {"q", "r", "t"}
    return inner
made = (outer(1, {"a", "b", "c"}), functools.partial(outer(2, "x"), 3), lambda x: x in {"i", "j"})
""",
        [
            ('"a", "b", "c"})', '"a", "b", "d"})'),
            ("outer(2", "outer(4"),
            (", 3)", ", 5)"),
            ('"i", "j"', '"i", "k"'),
            ('k={"a"', 'k={"e"'),
        ],
    ),
    "decorators": (
        """
def times(n, names=()):
    def around(f):
        @functools.wraps(f)
        def wrapped(*args): return [f(*args) for _ in range(n)]
        return wrapped
    return around
@times(2, names={"a", "b", "c"})
def made(x): return x
""",
        [("times(2", "times(3"), ("range(n)", "range(n + 1)")],
    ),
    "cached": (
        """
@functools.lru_cache(maxsize=3)
def settings(): return {"a", "b"}
@functools.cache
def factorial(n): return n * factorial(n - 1) if n else 1
UserId = NewType("UserId", int)
PS = ParamSpec("PS")
def typed(f: Callable[PS, UserId]) -> Callable[PS, UserId]: return f
class Model:
    @functools.cached_property
    def p(self): return 1
class made(BaseModel):
    x: int = 1
    @computed_field
    @functools.cached_property
    def y(self) -> int: return settings() and factorial(self.x) and Model().p and typed(len)
""",
        [
            ("maxsize=3", "maxsize=4"),
            ('{"a", "b"}', '{"a", "c"}'),
            ("n * factorial", "n + factorial"),
            ("def p(self): return 1", "def p(self): return 2"),
            ('"UserId", int', '"UserId", str'),
        ],
    ),
    "classes": (
        """
class Base(abc.ABC):
    @abc.abstractmethod
    def f(self): ...
    @abc.abstractmethod
    def g(self): ...
class Other(Base): pass
class R1: pass
class R2: pass
class R3: pass
for each in (R1, R2, R3): Base.register(each)
class made(Base):
    KINDS = {"a", "b", "c"}
    __slots__ = ("x", "y")
    def f(self): return 1
    def g(self): return {"a", "b"}
""",
        [
            ("made(Base)", "made(Other)"),
            ("return 1", "return 2"),
            ("(R1, R2, R3)", "(R1, R2)"),
            ('"a", "b", "c"}', '"a", "b", "d"}'),
        ],
    ),
    "generic_classes": (
        """
T = TypeVar("T", bound=int)
@runtime_checkable
class P(Protocol):
    def f(self) -> int: ...
    def g(self) -> int: ...
class G(Generic[T]):
    def f(self, x: T) -> list[T]: return [x]
class made(G[int]):
    def g(self, p: Optional[P]) -> List[Dict[str, int]]: return {}
""",
        [("bound=int", "bound=float"), ("G[int]", "G[bool]"), ("Dict[str, int]", "Dict[str, str]")],
    ),
    "dataclasses": (
        """
@dataclasses.dataclass(frozen=True, slots=True)
class made:
    x: int = 1
    l: list = dataclasses.field(default_factory=list, metadata={"a": 1})
    k: frozenset = frozenset({"a", "b", "c"})
""",
        [("x: int = 1", "x: int = 2"), ("frozen=True, ", ""), ('{"a": 1}', '{"a": 2}')],
    ),
    "enums": (
        """
class E(enum.Enum):
    A = enum.auto()
    B = "x"
    def m(self): return 1
class F(enum.IntFlag):
    X = 1
    Y = 2
made = (E, F, F.X | F.Y, E.A)
""",
        [('"x"', '"y"'), ("E.A)", "E.B)"), ("return 1", "return 2"), ("Y = 2", "Y = 4")],
    ),
    "tuples_and_dicts": (
        """
class N(NamedTuple):
    a: int
    b: str = "x"
P = collections.namedtuple("P", "a b")
class D(TypedDict, total=False):
    a: int
    b: str
made = (N, P, P(1, 2), N(1), D)
""",
        [('b: str = "x"', 'b: str = "y"'), ("P(1, 2)", "P(1, 3)"), ("total=False", "total=True")],
    ),
    "sets": (
        """
class Ours(set): pass
class Frozen(frozenset): pass
class Known:
    seen = weakref.WeakSet()
class K1: pass
class K2: pass
class K3: pass
for each in (K1, K2, K3): Known.seen.add(each)
NAMES = {"a", "b", ("x", 1)}, frozenset({"x", "y", "z"}), Ours("uvwx"), {"k": Frozen("uvwx")}
def made(): return NAMES, Known
""",
        [('"z"', '"w"'), ('Ours("uvwx")', 'Ours("uvw")'), ('Ours("uvwx")', 'set("uvwx")')],
    ),
    "regexes": (
        'made = (re.compile("a+b", re.I), re.compile(b"x"))\n',
        [("a+b", "a*b"), (", re.I", "")],
    ),
    "generated": (
        """
class Descriptor:
    def __init__(self, name, fields): self.name, self.fields = name, fields
class Meta(type):
    def __new__(meta, name, bases, body):
        described = body.get("DESCRIPTOR")
        for number, name_ in enumerate(described.fields if described else ()):
            body[name_.upper() + "_FIELD_NUMBER"] = number
        return super().__new__(meta, name, bases, body)
class Message(metaclass=Meta): pass
def message(name, *fields):
    body = {"DESCRIPTOR": Descriptor(name, fields), "__module__": __name__}
    return Meta(name, (Message,), body)
made = message("Hello", "name", "age")
""",
        [('"age"', '"years"'), ('"name", "age"', '"age", "name"')],
    ),
    "addresses": (
        """
class K: pass
kept = K()
NAMES = repr(kept), repr(K()), object.__repr__(K), f"the one {kept!r}", "at:170000000000000"
def made(): return NAMES, kept, 1_700_000_000_000
""",
        [("at:170000000000000", "at:170000000000016"), ("1_700_000_000_000", "1_700_000_000_016")],
    ),
    "models": (
        """
class Inner(BaseModel):
    x: int = 1
class made(BaseModel):
    i: Inner
    more: list[Inner] = []
    names: Dict[str, Optional[Inner]] = {}
    kids: "list[made]" = []
    def total(self): return 1
""",
        [
            ("x: int = 1", "x: int = 2"),
            ("x: int = 1", "x: float = 1"),
            ("return 1", "return 2"),
            ("list[Inner]", "set[Inner]"),
        ],
    ),
    "generic_models": (
        """
T = TypeVar("T")
class Page(BaseModel, Generic[T]):
    item: T
class made(BaseModel):
    a: Page[int]
    b: Page[list[str]]
""",
        [("Page[int]", "Page[str]"), ("list[str]", "list[int]"), ("item: T", "item: list[T]")],
    ),
    "validators": (
        """
class made(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    x: int = Field(1, ge=0, description="d")
    kinds: set[str] = {"a", "b", "c"}
    _hidden: int = PrivateAttr(3)
    @field_validator("x", mode="before")
    @classmethod
    def v(cls, value): return value
    @model_validator(mode="after")
    def m(self): return self
    @computed_field
    @property
    def y(self) -> int: return self.x + 1
""",
        [
            ("ge=0", "ge=1"),
            ('mode="before"', 'mode="after"'),
            ('"forbid"', '"allow"'),
            ("return value", "return -value"),
            ("PrivateAttr(3)", "PrivateAttr(4)"),
            ("self.x + 1", "self.x + 2"),
        ],
    ),
    "models_of_much": (
        """
class E(enum.Enum):
    A = 1
@dataclasses.dataclass
class D:
    x: int = 1
    e: E = E.A
class N(NamedTuple):
    a: int
class T(PydanticTypedDict):
    a: int
class A(BaseModel):
    kind: Literal["a"]
class B(BaseModel):
    kind: Literal["b"]
@pydantic.dataclasses.dataclass(slots=True)
class S:
    x: int = 1
class M(BaseModel):
    e: E
    d: D
    n: N
    t: T
    s: S
    at: datetime.datetime
    key: uuid.UUID
    u: Annotated[Union[A, B], Field(discriminator="kind")]
    f: Optional[Callable[[int], str]] = None
class Root(pydantic.RootModel):
    root: list[int]
def local():
    y = 3
    class Local(BaseModel):
        x: int = y
    return Local
Adapter = TypeAdapter(list[A])
Created = pydantic.create_model("Created", x=(int, 1), __module__=__name__)
@pydantic.validate_call
def checked(x: int) -> int: return x
made = (M, Adapter, Root, local(), Created, checked)
""",
        [
            ("A = 1", "A = 2"),
            ('Literal["b"]', 'Literal["c"]'),
            ("list[A]", "list[B]"),
            ("y = 3", "y = 4"),
            ("x=(int, 1)", "x=(int, 2)"),
            ("checked(x: int)", "checked(x: float)"),
            ("slots=True", "slots=False"),
        ],
    ),
    "fastapi": (
        """
import fastapi
from fastapi import APIRouter, Depends, FastAPI, Header, Query
from fastapi.middleware.cors import CORSMiddleware
from greenroom import serve

class Item(BaseModel):
    name: str
    tags: set[str] = set()
class Out(BaseModel):
    item: Item
    n: int = 0
def dep(q: str = "x", h: Annotated[Optional[str], Header()] = None): return q
class Common:
    def __init__(self, a: int = 1): self.a = a
router = APIRouter(prefix="/r", tags=["t"], dependencies=[Depends(dep)])
@router.post("/items", response_model=Out, status_code=201, responses={404: {"model": Item}})
async def post(item: Item, q: Annotated[str, Query(max_length=5)] = "x",
               d=Depends(dep), c: Common = Depends()) -> Out:
    return Out(item=item)
app = FastAPI(title="x")
app.include_router(router)
app.include_router(router, prefix="/v2")
app.add_middleware(CORSMiddleware, allow_origins=["*"])
@app.middleware("http")
async def around(request, call_next): return await call_next(request)
@app.exception_handler(ValueError)
async def handle(request, error): return fastapi.responses.JSONResponse({})
@app.websocket("/ws")
async def ws(socket: fastapi.WebSocket): pass
@serve.ingress(app)
class made:
    @app.get("/own/{x}")
    def own(self, x: int) -> Out: return Out(item=Item(name="a"))
""",
        [
            ("max_length=5", "max_length=6"),
            ("status_code=201", "status_code=202"),
            ("return q\n", 'return q + "!"\n'),
            ('prefix="/v2"', 'prefix="/v3"'),
            ('["*"]', '["http://a"]'),
            ("name: str", "name: int"),
            ('Item(name="a")', 'Item(name="b")'),
        ],
    ),
    "attrs": (
        """
import attrs
@attrs.define
class A:
    x: int = attrs.field(default=1, validator=attrs.validators.instance_of(int))
@attrs.frozen
class made:
    a: A
    z: str = attrs.field(converter=str, default="")
""",
        [
            ("default=1", "default=2"),
            ("instance_of(int)", "instance_of(str)"),
            ("frozen", "define"),
        ],
    ),
}
FORWARDS, BACKWARDS = ("forwards", "1"), ("backwards", "2")  # order and hash seed
FINGERPRINTS = """
import importlib, json, pathlib, sys
import cloudpickle
from greenroom.serve.code.packing import pack_code

def mark(folder):
    sys.path.insert(0, str(folder))
    sys.modules.pop("app", None)
    importlib.invalidate_caches()
    app = importlib.import_module("app")
    sys.path.pop(0)
    cloudpickle.register_pickle_by_value(app)
    first, again = (pack_code("it", app.deployed, (app.made,), {}, None).hash for _ in "12")
    return first if first == again else f"{first}, then {again}"

root = pathlib.Path(sys.argv[1])
names = sorted(path.relative_to(root).as_posix() for path in root.glob("*/*"))
if sys.argv[2] == "backwards":
    names.reverse()
print(json.dumps({name: mark(root / name) for name in names}))
"""


@pytest.fixture(scope="module")
def marks(tmp_path_factory):
    """Return what makes the fingerprints of all cases and their changes, in a process."""
    root = tmp_path_factory.mktemp("cases")
    for name, (source, changes) in CASES.items():
        for number, (old, new) in enumerate([("", ""), *changes]):
            assert old in source, (name, old)
            folder = root / name / str(number)
            folder.mkdir(parents=True)
            changed = source.replace(old, new) if old else source
            text = f"{HEAD}{changed}\ndef deployed(*args): return args\n"
            (folder / "app.py").write_text(text)

    @functools.cache
    def made(order, seed):
        return json.loads(python("-c", FINGERPRINTS, root, order, PYTHONHASHSEED=seed))

    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equal_code_has_an_equal_fingerprint_in_every_process(marks, name):
    first, second = (
        {at: mark for at, mark in marks(*how).items() if at.startswith(f"{name}/")}
        for how in (FORWARDS, BACKWARDS)
    )
    assert first == second
    assert all(len(mark) == 64 for mark in first.values()), first


@pytest.mark.parametrize("name", CASES)
def test_other_code_has_another_fingerprint(marks, name):
    found = {at: mark for at, mark in marks(*FORWARDS).items() if at.startswith(f"{name}/")}
    assert len(set(found.values())) == len(CASES[name][1]) + 1, found


def test_a_fingerprint_does_not_change_with_what_the_process_did_before():
    class Model:
        names = frozenset({"a", "b"})

        def __call__(self):
            return xml.dom.minidom

    before = fingerprint(Model)
    copy.copy(Model())  # copyreg notes the slots that it found in the class
    importlib.import_module("xml.dom.minidom")
    assert fingerprint(Model) == before
