"""Grammars: compiled by llguidance under limits, tried first in a process that may die."""

from palaver.engines.grammars.cache import GrammarCache
from palaver.engines.grammars.compiler import CompiledGrammar, GrammarCompiler, check_matcher

__all__ = ["CompiledGrammar", "GrammarCache", "GrammarCompiler", "check_matcher"]
