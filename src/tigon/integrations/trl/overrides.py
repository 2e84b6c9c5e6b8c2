"""Methods of one trainer instance that tigon replaces."""

from __future__ import annotations

from typing import Any


class Override:
    """One attribute of an instance, set until `restore`."""

    def __init__(self, instance: object, name: str, value: object) -> None:
        self.instance, self.name, self.value = instance, name, value
        self.original: Any = getattr(instance, name)
        """The instance's earlier attribute, as its callers see it."""
        self._own = name in vars(instance)
        setattr(instance, name, value)

    def restore(self) -> None:
        """Give the instance its earlier attribute back, unless somebody has set another one since."""
        if vars(self.instance).get(self.name) != self.value:
            return
        if self._own:
            setattr(self.instance, self.name, self.original)
        else:
            delattr(self.instance, self.name)
