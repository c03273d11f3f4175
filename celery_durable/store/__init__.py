"""The SQL side: schema, statements, migrations. Nothing here loads Celery or Kafka."""
