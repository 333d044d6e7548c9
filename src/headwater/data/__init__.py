"""Prompts: built-in tasks and files of rows, turned into tokenised ``Prompt`` records in a resumable order."""
