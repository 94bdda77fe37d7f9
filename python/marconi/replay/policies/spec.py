"""A policy as the command line names it: `NAME[:NUMBER][@ADMISSION]`, several separated by commas."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """The parts of a policy's name, not yet looked up."""

    name: str
    parameter: str | None = None
    """What follows the colon; None takes the policy's default."""
    admission: str | None = None
    """What follows the `@`; None takes the policy's own."""

    @classmethod
    def parse(cls, text: str) -> "PolicySpec":
        """Read one policy; `ValueError` where a part is empty."""
        head, at, admission = text.strip().partition("@")
        name, colon, parameter = head.partition(":")
        if not name or (at and not admission) or (colon and not parameter):
            raise ValueError(f"policy {text!r}: NAME, NAME:NUMBER or either with @ADMISSION is right")
        return cls(name, parameter if colon else None, admission if at else None)

    def __str__(self) -> str:
        parameter = "" if self.parameter is None else f":{self.parameter}"
        return f"{self.name}{parameter}" + ("" if self.admission is None else f"@{self.admission}")


def parse_list(text: str) -> tuple[PolicySpec, ...]:
    """Read policies separated by commas; `ValueError` for an empty list or the same one twice."""
    specs = tuple(PolicySpec.parse(part) for part in text.split(","))
    if len(set(specs)) != len(specs):
        raise ValueError(f"--policy {text!r} names a policy twice")
    return specs
