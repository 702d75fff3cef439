"""Trials of formats: recorded replies, round trips of partial replies, and a readable report of the learned facts."""
