"""Grammars: checked in a sandbox process, then compiled by llguidance under limits."""

from palaver.engines.grammars.cache import GrammarCache
from palaver.engines.grammars.compiler import CompiledGrammar, GrammarCompiler, check_matcher, missing_package

__all__ = ["CompiledGrammar", "GrammarCache", "GrammarCompiler", "check_matcher", "missing_package"]
