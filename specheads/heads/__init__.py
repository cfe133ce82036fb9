"""Draft heads by name."""

from specheads.heads.base import Head
from specheads.heads.eagle3 import Eagle3Head
from specheads.heads.medusa import MedusaHead

HEADS: dict[str, type[Head]] = {"medusa": MedusaHead, "eagle3": Eagle3Head}
