"""Names of files inside a save."""


def part_name(rank: int) -> str:
    """A rank's list of what it wrote; in drafts only."""
    return f".part-{rank}.pickle"


def local_name(rank: int) -> str:
    """A rank's shards in the ``local`` layout."""
    return f"rank-{rank}.pt"
