"""Trainers: what each can run, how its launches are written, read and checked, and its logs."""
