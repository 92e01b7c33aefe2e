"""The protocols of managed services: Amazon SageMaker and Google Vertex AI."""
