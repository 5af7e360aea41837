"""Tiers: where a kept value is stored, and how many bytes are there."""

from recoup.engine.tiers.account import tier_usage
from recoup.engine.tiers.device import Device
from recoup.engine.tiers.disk import Disk
from recoup.engine.tiers.eight_bit import EightBit
from recoup.engine.tiers.half import Half
from recoup.engine.tiers.host import Host
from recoup.engine.tiers.packed import Packed
from recoup.engine.tiers.protocol import ExactTier, LossyTier, Stored, Tier

__all__ = [
    "Device",
    "Disk",
    "EightBit",
    "ExactTier",
    "Half",
    "Host",
    "LossyTier",
    "Packed",
    "Stored",
    "Tier",
    "tier_usage",
]
