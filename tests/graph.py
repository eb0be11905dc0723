"""What depends on what in the synthesized templates: Ref, GetAtt, Sub, DependsOn, imports, stack dependencies."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Any

from tests.synth import Synthesis

Key = tuple[str, str]
"""Part and logical id."""


class Graph:
    """Edges lead from a resource to those that are created before it, and deleted after it."""

    def __init__(self, synthesis: Synthesis) -> None:
        self.synthesis = synthesis
        self.types = {
            (part, id): str(resource["Type"])
            for part, template in synthesis.templates.items()
            for id, resource in template["Resources"].items()
        }
        self._exports = {
            output["Export"]["Name"]: (part, output["Value"])
            for part, template in synthesis.templates.items()
            for output in template.get("Outputs", {}).values()
            if "Export" in output
        }
        self.edges: dict[Key, set[Key]] = {key: set(self._direct(key)) for key in self.types}

    def _direct(self, key: Key) -> Iterator[Key]:
        part, id = key
        resource = self.synthesis.templates[part]["Resources"][id]
        needed = resource.get("DependsOn", [])
        for name in [needed] if isinstance(needed, str) else needed:
            yield part, name
        yield from (found for found in self._references(part, resource.get("Properties", {})) if found != key)

    def _references(self, part: str, value: Any) -> Iterator[Key]:
        if isinstance(value, list):
            for item in value:
                yield from self._references(part, item)
            return
        if not isinstance(value, dict):
            return
        for name, inner in value.items():
            if name == "Fn::ImportValue" and isinstance(inner, str):
                yield from self._references(*self._exports[inner])
                continue
            names: list[str] = []
            if name == "Ref":
                names = [inner]
            elif name == "Fn::GetAtt":
                names = [inner.split(".")[0] if isinstance(inner, str) else inner[0]]
            elif name == "Fn::Sub":
                text = inner if isinstance(inner, str) else inner[0]
                names = [match.split(".")[0] for match in re.findall(r"\$\{([^!}]+)\}", text)]
            yield from ((part, target) for target in names if (part, target) in self.types)
            yield from self._references(part, inner)

    def needs(self, later: Key, earlier: Key, *, across_stacks: bool = True) -> bool:
        """Whether ``earlier`` is there before ``later`` is made, and so outlives it.

        ``across_stacks``: the command line's order of stacks counts as well as the references.
        """
        return self.path(later, earlier, across_stacks=across_stacks) is not None

    def path(self, later: Key, earlier: Key, *, across_stacks: bool = True) -> list[Key] | None:
        """A shortest way of dependencies, or None. A stack dependency shows as a step into the other stack."""
        assert later in self.types and earlier in self.types, (later, earlier)
        before: dict[Key, Key] = {}
        waiting = deque([later])
        while waiting:
            key = waiting.popleft()
            if key == earlier and key != later:
                way = [key]
                while way[-1] != later:
                    way.append(before[way[-1]])
                return way[::-1]
            following = set(self.edges[key])
            if across_stacks and earlier[0] in self.stacks_before(key[0]):
                following.add(earlier)
            for target in following:
                if target not in before and target != later:
                    before[target] = key
                    waiting.append(target)
        return None

    def stacks_before(self, part: str) -> set[str]:
        """The stacks that are deployed before ``part``, transitively."""
        found: set[str] = set()
        waiting = [part]
        while waiting:
            for earlier in self.synthesis.stack_dependencies[waiting.pop()]:
                if earlier not in found:
                    found.add(earlier)
                    waiting.append(earlier)
        return found

    def of_type(self, kind: str) -> list[Key]:
        return [key for key, found in self.types.items() if found == kind]
