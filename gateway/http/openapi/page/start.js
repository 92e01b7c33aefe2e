// Shows the description that the server of this page has of itself.
SwaggerUIBundle({
  dom_id: "#api",
  url: "openapi.json",
  deepLinking: true,
  displayRequestDuration: true,
  filter: true,
  // The examples are requests; schemas are in the operations that use them.
  defaultModelsExpandDepth: -1,
  validatorUrl: null,
});
