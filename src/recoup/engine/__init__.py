"""Carry it out: record regions, replay them in backward, and the tools made of it."""
