"use strict";
(() => {
  const choice = document.querySelector(".slider input");
  const said = document.querySelector(".slider output");
  const plans = [...document.querySelectorAll(".plan")];
  const points = [...document.querySelectorAll("a[data-plan]")];
  const show = (number) => {
    plans.forEach((plan, n) => plan.classList.toggle("shown", n === number));
    points.forEach((point) =>
      point.classList.toggle("current", Number(point.dataset.plan) === number));
    const words = plans[number].dataset.words;
    choice.value = String(number);
    choice.setAttribute("aria-valuetext", words);
    said.textContent = words;
  };
  choice.addEventListener("input", () => show(Number(choice.value)));
  points.forEach((point) => point.addEventListener("click", (event) => {
    event.preventDefault();
    show(Number(point.dataset.plan));
    choice.focus();
  }));
  const asked = /^#plan-(\d+)$/.exec(location.hash);
  show(asked && Number(asked[1]) < plans.length ? Number(asked[1]) : Number(choice.value));
})();
