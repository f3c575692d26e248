"""The size and shape of the code: limits that only go down.

Raise a limit only for a new capability, and state the budget in the commit. Lower a limit whenever
the code gets smaller. `python -m tests.test_house` prints the current figures.
"""

import ast
import io
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import grimp
import networkx

ROOT = Path(__file__).parents[1]

LINES = 38_281  # the goal is 17,000 for what 0.1.0 had; 10,000 are for all that came later
FILES = 174  # the goal is 115 for what 0.1.0 had
LONGEST_FILE = 400
LONGEST_FUNCTION = 60
LONGEST_LINE = 100
PACKED_PER_1000_LINES = 4.0
COMMENT_SHARE = 0.07
TEST_LINES = 20_668  # the goal is 9,000


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def functions(tree: ast.AST) -> list[int]:
    """The length of every function, decorators included."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in found]


def packed(tree: ast.AST) -> int:
    """Assignments of several values to several names in one statement: `a, b = x, y`."""
    return sum(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
        for node in ast.walk(tree)
    )


def commented_lines(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


@cache
def figures() -> dict[str, float]:
    """Every figure of pipeline/ and launch/ that a limit is set for."""
    files = sources("pipeline", "launch")
    texts = {path: path.read_text() for path in files}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lengths = {path: len(text.splitlines()) for path, text in texts.items()}
    names = Counter(path.name for path in files if path.name != "__init__.py")
    lines = sum(lengths.values())
    spans = [length for tree in trees.values() for length in functions(tree)]
    return {
        "lines": lines,
        "files": sum(names.values()),
        "longest file": max(lengths.values()),
        "longest function": max(spans),
        "functions above 40": sum(span > 40 for span in spans),
        "longest line": max(len(line) for text in texts.values() for line in text.splitlines()),
        "repeated names": sum(count > 1 for count in names.values()),
        "packed per 1000 lines": 1000 * sum(map(packed, trees.values())) / lines,
        "comment share": sum(map(commented_lines, texts.values())) / lines,
        "median file": sorted(lengths[path] for path in files if path.name != "__init__.py")[
            sum(names.values()) // 2
        ],
        "test lines": sum(len(path.read_text().splitlines()) for path in sources("tests")),
    }


def test_size_stays_within_its_limits() -> None:
    now = figures()
    assert now["lines"] <= LINES
    assert now["files"] <= FILES
    assert now["longest file"] <= LONGEST_FILE
    assert now["longest line"] <= LONGEST_LINE
    assert now["test lines"] <= TEST_LINES


def test_code_stays_plain() -> None:
    now = figures()
    assert now["longest function"] <= LONGEST_FUNCTION
    assert now["repeated names"] == 0
    assert now["packed per 1000 lines"] <= PACKED_PER_1000_LINES
    assert now["comment share"] >= COMMENT_SHARE


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Counts imports inside functions and under TYPE_CHECKING, too."""
    graph = grimp.build_graph("pipeline", "launch")
    imports = networkx.DiGraph(
        (module, target)
        for module in graph.modules
        for target in graph.find_modules_directly_imported_by(module)
    )
    circles = networkx.strongly_connected_components(imports)
    assert [sorted(circle) for circle in circles if len(circle) > 1] == []


if __name__ == "__main__":
    for name, value in figures().items():
        print(f"{name:24} {value:10.4g}" if value < 1 else f"{name:24} {value:10.1f}")
