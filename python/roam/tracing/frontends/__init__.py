"""Graphs that other tools made, turned into roam's: those of AOTAutograd, and `fx` graphs."""
