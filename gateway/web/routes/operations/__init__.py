"""Endpoints for operators: the web page, health, metrics, the API description and /admin."""
