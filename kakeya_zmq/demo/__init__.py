"""The demonstration: a real small model made from packages of the registry, and a document to ask about."""
