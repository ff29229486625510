import { askForKey, call } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { Engine } from "./engine.js";

const ownRequests = new Set();
byId("use-key").addEventListener("click", async () => {
  await askForKey();
  location.reload();
});
new Chat(ownRequests);
new Engine(ownRequests).watch();

call("/v1/models").then(async (response) => {
  if (response.ok) byId("model").textContent = (await response.json()).data[0].id;
});
