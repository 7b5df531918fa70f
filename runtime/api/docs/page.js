// The page of the API: what openapi.json says, and a form for each operation. No library, and nothing from elsewhere.
"use strict";

const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};

// Text in which `words` are code.
const prose = (text) =>
  (text ?? "").split("`").map((piece, n) => (n % 2 ? make("code", { textContent: piece }) : piece));

const key = document.querySelector("#key");
key.value = sessionStorage.getItem("key") ?? "";
key.addEventListener("input", () => sessionStorage.setItem("key", key.value));

fetch("/openapi.json").then((answer) => answer.json()).then(show);

function show(api) {
  document.querySelector("#version").textContent = api.info.version;
  document.querySelector("#introduction").append(...prose(api.info.description));
  const main = document.querySelector("#operations");
  main.replaceChildren();
  for (const tag of api.tags) {
    main.append(make("h2", { textContent: tag.name }));
    for (const [path, methods] of Object.entries(api.paths)) {
      for (const [method, operation] of Object.entries(methods)) {
        if (operation.tags.includes(tag.name)) main.append(operationOf(api, path, method, operation));
      }
    }
  }
}

function operationOf(api, path, method, operation) {
  const head = make("summary", {},
    make("b", { className: method, textContent: method.toUpperCase() }),
    make("code", { textContent: path }), make("span", { textContent: operation.summary }));
  const form = make("form", { autocomplete: "off" });
  const fields = (operation.parameters ?? []).map((parameter) => fieldOf(parameter));
  fields.forEach(({ row }) => form.append(row));
  const schema = operation.requestBody?.content["application/json"].schema;
  const body = schema && make("textarea", { rows: 5, spellcheck: false, value: example(api, schema) });
  if (body) form.append(make("label", {}, "body ", body));
  const send = make("button", { textContent: method === "get" ? "Ask" : "Do it" });
  const said = make("pre", { className: "answer", hidden: true });
  form.append(send);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask(path, method, fields, body, said);
  });
  return make("details", { id: operation.operationId }, head,
    make("p", {}, ...prose(operation.description)), form, said,
    schema ? schemaOf("body", api, schema) : "", ...answersOf(api, operation));
}

function fieldOf(parameter) {
  const input = make("input", { required: parameter.required, placeholder: placeholder(parameter.schema) });
  const words = make("small", {}, ...prose(parameter.description));
  return { parameter, input, row: make("label", {}, make("code", { textContent: parameter.name }), input, words) };
}

function placeholder(schema) {
  return schema.enum?.join(" | ") ?? [schema.type, schema.default === undefined ? "" : `(${schema.default})`].join(" ");
}

function answersOf(api, operation) {
  const found = Object.entries(operation.responses).map(([status, response]) => {
    const meant = response.$ref ? look(api, response.$ref) : response;
    const schema = meant.content?.["application/json"]?.schema;
    const row = make("div", {}, make("b", { textContent: status }), " ", ...prose(meant.description));
    if (schema) row.append(schemaOf("", api, schema));
    return row;
  });
  return [make("h3", { textContent: "answers" }), ...found];
}

function schemaOf(title, api, schema) {
  const text = JSON.stringify(whole(api, schema, 0), null, 1);
  return make("details", {}, make("summary", { textContent: `${title} schema` }), make("pre", { textContent: text }));
}

const look = (api, ref) => ref.slice(2).split("/").reduce((at, part) => at[part], api);

function whole(api, schema, depth) {
  if (Array.isArray(schema)) return schema.map((each) => whole(api, each, depth));
  if (schema === null || typeof schema !== "object" || depth > 8) return schema;
  if (schema.$ref) return whole(api, look(api, schema.$ref), depth + 1);
  return Object.fromEntries(Object.entries(schema).map(([name, value]) => [name, whole(api, value, depth + 1)]));
}

function example(api, schema) {
  const meant = whole(api, schema, 0);
  const first = meant.oneOf?.[0] ?? meant;
  const likely = (property) => property.const ?? property.enum?.[0] ?? (property.type === "integer" ? 1 : "");
  const required = (first.required ?? []).map((name) => [name, likely(first.properties[name])]);
  return JSON.stringify(Object.fromEntries(required), null, 1);
}

async function ask(path, method, fields, body, said) {
  const url = new URL(location.origin);
  const headers = key.value ? { Authorization: `Bearer ${key.value}` } : {};
  for (const { parameter, input } of fields) {
    if (input.value === "") continue;
    if (parameter.in === "path") path = path.replace(`{${parameter.name}}`, encodeURIComponent(input.value));
    if (parameter.in === "header") headers[parameter.name] = input.value;
    if (parameter.in === "query") url.searchParams.append(parameter.name, input.value);
  }
  url.pathname = path;
  if (body) headers["Content-Type"] = "application/json";
  said.hidden = false;
  said.textContent = "…";
  try {
    const answer = await fetch(url, { method: method.toUpperCase(), headers, body: body?.value });
    said.textContent = `${answer.status} ${answer.statusText}\n\n`;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) said.append(piece.value);
    if (answer.headers.get("Content-Type")?.includes("json")) said.textContent = pretty(said.textContent);
  } catch (error) {
    said.textContent = String(error);
  }
}

function pretty(text) {
  const [head, ...rest] = text.split("\n\n");
  try {
    return `${head}\n\n${JSON.stringify(JSON.parse(rest.join("\n\n")), null, 1)}`;
  } catch {
    return text;
  }
}
