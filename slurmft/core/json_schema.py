"""JSON Schemas of what commands print, made from the types of what they print.

The types are those that `core.decode` reads, and `Literal`, enumerations, named tuples, and
`Annotated[dict[str, Any], C]`: a dictionary with the fields of the class C. The docstrings of a
class and of its fields become descriptions.
"""

import ast
import dataclasses
import enum
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_SIMPLE: dict[Any, dict[str, Any]] = {
    Any: {},
    object: {},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    type(None): {"type": "null"},
}


def schema_of(kinds: Sequence[Any], title: str) -> dict[str, Any]:
    """Returns the schema of a value that is of one of these types."""
    definitions: dict[str, Any] = {}
    alternatives = [_schema(kind, definitions) for kind in kinds]
    return {
        "$schema": DIALECT,
        "title": title,
        "anyOf": alternatives,
        "$defs": dict(sorted(definitions.items())),
    }


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a type; classes with fields go into `definitions`."""
    if kind in _SIMPLE:
        return dict(_SIMPLE[kind])
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    # That a field may be absent is said by its object: see `required` in `_object`.
    if origin is NotRequired:
        return _schema(arguments[0], definitions)
    if origin is Annotated:
        return _annotated(arguments[0], arguments[1], definitions)
    if origin is Literal:
        return {"enum": list(arguments)}
    # Optional[X] is of the one kind, X | None of the other.
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(each, definitions) for each in arguments]}
    # A tuple with a type for each place; tuple[X, ...] is a list of any length. `items` is for
    # places behind those of `prefixItems`: there are none.
    if origin is tuple and arguments[-1] is not Ellipsis:
        items = [_schema(each, definitions) for each in arguments]
        return {"type": "array", "prefixItems": items, "items": False}
    if origin in (list, tuple):
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        # Keys are not described: in JSON all are texts.
        values = _schema(arguments[1], definitions)
        return {"type": "object", "additionalProperties": values}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [each.value for each in kind]}
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}  # a class may have fields of its own type
        definitions[kind.__name__] = _object(kind, definitions)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _annotated(
    kind: Any, annotation: Any, definitions: dict[str, Any]
) -> dict[str, Any]:
    """Returns the schema of an annotated type: a whole number with its bounds, or a dictionary with
    the fields of a class."""
    if isinstance(annotation, type):
        return _schema(annotation, definitions)
    schema = _schema(kind, definitions)
    if isinstance(annotation, range):
        return schema | {
            "minimum": annotation.start,
            "maximum": annotation.stop - 1,
        }
    return schema


def _object(kind: type[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a TypedDict, a dataclass or a named tuple."""
    # Without the extras, Annotated and NotRequired would be stripped.
    hints = typing.get_type_hints(kind, include_extras=True)
    descriptions = _descriptions(kind)
    properties = {}
    for name in _field_names(kind):
        field = _schema(hints[name], definitions)
        if name in descriptions:
            field["description"] = descriptions[name]
        properties[name] = field
    # A TypedDict alone has fields that may be absent: the others are printed whole.
    required = sorted(getattr(kind, "__required_keys__", properties))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": required,
        # A key that is not declared here is a mistake, which the tests find by this.
        "additionalProperties": False,
    }
    if kind.__doc__:
        description = inspect.cleandoc(kind.__doc__)
        schema = {"description": " ".join(description.split())} | schema
    return schema


def _field_names(kind: type[Any]) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    if hasattr(kind, "_fields"):
        return list(kind._fields)
    return list(typing.get_type_hints(kind))


def _descriptions(kind: type[Any]) -> dict[str, str]:
    """Returns field -> the text below it in the source; those of base classes, too."""
    # Python keeps no text below a field: only the source has it.
    source = textwrap.dedent(inspect.getsource(kind))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    texts: dict[str, str] = {}
    # By their names in the source: a TypedDict is a plain dictionary, and knows no bases.
    names = vars(sys.modules[kind.__module__])
    for base in definition.bases:
        if isinstance(base, ast.Name) and names[base.id] not in (TypedDict, NamedTuple):
            texts |= _descriptions(names[base.id])
    name = ""
    for statement in definition.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=field)):
                name = field
            case ast.Expr(value=ast.Constant(value=str(text))) if name:
                texts[name] = " ".join(text.split())
    return texts
