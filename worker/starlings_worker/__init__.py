"""The worker: a supervisor that holds identity and the control stream, and one engine per device that
computes.
"""
