"""The ASGI application: middleware, routes, uploads and the OpenAPI document."""
