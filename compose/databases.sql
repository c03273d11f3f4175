-- PostgreSQL's image runs this once, when it makes its volume. The service's own database is POSTGRES_DB.
CREATE DATABASE holder;
