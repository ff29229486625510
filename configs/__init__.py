"""Options of the server: the schema, its sources and the presets. Imports pydantic only."""
